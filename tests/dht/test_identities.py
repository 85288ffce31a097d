"""Many free identities in a run: they hide no member, move no clock, and have no peer dial a third party."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from itertools import count

import pytest
import trio

from dht.config import DEFAULT_TUNING
from dht.key import as_int, node_key, record_key
from dht.node import StorageLimits
from dht.protocol import (
    FETCH,
    FIND,
    STORE,
    Contact,
    FetchReply,
    FetchRequest,
    FindReply,
    FindRequest,
    StoreReply,
    StoreRequest,
)
from dht.records import KIND, Body
from peer.errors import BarnraiseError
from peer.identity import Identity, sign_body
from peer.net.host import Host
from peer.net.rpc import Call
from tests.dht.support.local_swarm import BRISK, CARDS, RUN, Card, LocalSwarm, Member, bare_host, local_swarm
from tests.dht.support.open_run import guard

pytestmark = pytest.mark.slow

# Background work is rare, as in life; timeouts are long, because all nodes live in one process.
CALM = replace(
    DEFAULT_TUNING,
    reply_timeout_s=15.0,
    lookup_budget_s=40.0,
    bootstrap_timeout_s=40.0,
    probe_timeout_s=40.0,
    leave_timeout_s=5.0,
)
HOUR_S = 3600.0
KEY = "key"
STRANGERS_BYTES = 4096  # a key's room for strangers: ten of the sybils' records
NEWCOMER = Identity.generate()
CLAIMS = 100


def ground(many: int) -> list[Identity]:
    """Return the identities nearest to the key of 50 times as many: an attacker takes as many as it likes."""
    target = as_int(record_key(RUN, CARDS.name, KEY))
    made = (Identity.generate() for _ in range(50 * many))
    return sorted(made, key=lambda identity: node_key(identity.peer_id) ^ target)[:many]


@asynccontextmanager
async def run_of(members: int, *, is_open: bool) -> AsyncIterator[tuple[LocalSwarm, frozenset[str]]]:
    """Members who trust each other, all on 127.0.0.1, each with a record under the key."""
    identities = [Identity.generate() for _ in range(members)]
    trusted = frozenset(identity.peer_id for identity in identities)
    invited = trusted if is_open else trusted | {NEWCOMER.peer_id}
    async with local_swarm() as swarm:
        for identity in identities:
            await swarm.add(
                identity=identity,
                tuning=CALM,
                limits=StorageLimits(bytes_per_key=STRANGERS_BYTES),
                prepare=lambda host: guard(host, members=invited, is_open=is_open),
            )
        for member in swarm.members:
            for other in trusted - {member.id} - member.node.peers:
                await member.facts.wait("dht_peer_found", peer=other)
        for number, member in enumerate(swarm.members):
            assert await member.node.put(CARDS, KEY, Card(number), ttl_s=600) == members
        yield swarm, trusted


@asynccontextmanager
async def sybil(
    identity: Identity, victims: list[Member], others: list[Contact], clock_off_s: float
) -> AsyncIterator[Host]:
    """A node that answers with no records, names its like, shows a wrong clock, and has called every victim."""

    async def find(call: Call[FindRequest]) -> FindReply:
        return FindReply(tuple(others[:16]), True, ahead(clock_off_s))

    async def store(call: Call[StoreRequest]) -> StoreReply:
        return StoreReply(kept=True, newest_us=0, clock_s=ahead(clock_off_s))

    async def fetch(call: Call[FetchRequest]) -> tuple[FetchReply, bytes]:
        return FetchReply(ahead(clock_off_s)), b"\x90"

    async with bare_host(identity) as host:
        guard(host)
        host.rpc.register(FIND, find)
        host.rpc.register(STORE, store)
        host.rpc.register(FETCH, fetch)
        others.append(Contact(host.peer_id, host.addresses))
        for victim in victims:
            await host.connect_address(victim.address, timeout_s=60)
            try:
                await host.rpc.call(victim.id, FIND, FindRequest(RUN, host.addresses, bytes(32)), timeout_s=60)
                body = Body(RUN, CARDS.name, KEY, CARDS.encode(Card(0, "x" * 250)), int(time.time() * 1e6), 600_000)
                request = StoreRequest(RUN, host.addresses, sign_body(identity, KIND, body))
                assert (await host.rpc.call(victim.id, STORE, request, timeout_s=60)).body.kept
            except BarnraiseError:
                assert not victim.host.admissions.allows(host.peer_id, "member")
        yield host


@asynccontextmanager
async def besieged(swarm: LocalSwarm, many: int, clock_off_s: float = 0.0) -> AsyncIterator[list[Host]]:
    """Add sybils with ids ground to the key, and wait until each has greeted every member."""
    victims, contacts, hosts = list(swarm.members), list[Contact](), list[Host]()
    leave, ready, limit = trio.Event(), trio.Semaphore(0), trio.CapacityLimiter(4)
    async with trio.open_nursery() as nursery:

        async def live(identity: Identity) -> None:
            async with AsyncExitStack() as stack:
                async with limit:  # more handshakes at once would be refused
                    hosts.append(await stack.enter_async_context(sybil(identity, victims, contacts, clock_off_s)))
                ready.release()
                await leave.wait()

        for identity in ground(many):
            nursery.start_soon(live, identity)
        for _ in range(many):
            await ready.acquire()
        yield hosts
        leave.set()


@pytest.mark.parametrize(
    ("many", "is_open"),
    [
        pytest.param(10, False, id="10-closed"),
        pytest.param(10, True, id="10-open"),
        pytest.param(30, False, id="30-closed", marks=pytest.mark.soak),
        pytest.param(30, True, id="30-open", marks=pytest.mark.soak),
    ],
)
async def test_ground_identities_hide_no_member(request: pytest.FixtureRequest, many: int, is_open: bool) -> None:
    within_s = 5.0 if request.node.get_closest_marker("soak") else 120.0
    async with run_of(4, is_open=is_open) as (swarm, trusted), besieged(swarm, many) as sybils:
        ids = {host.peer_id for host in sybils}
        known = {peer for member in swarm.members for peer in member.node.peers}
        assert known & ids == (ids if is_open else set()), "a client is in no table"
        invite = [swarm.members[0].address]

        def prepare(host: Host) -> None:
            first = {swarm.members[0].id}  # a newcomer to an open run knows the invite's peers only
            guard(host, members=first if is_open else trusted | {host.peer_id}, is_open=is_open)

        newcomer = await swarm.add(invite, identity=NEWCOMER, tuning=CALM, prepare=prepare)
        readings = [(await newcomer.node.get(CARDS, KEY)).keys() >= trusted for _ in range(100)]
        assert sum(readings) >= 99
        started = trio.current_time()
        assert await newcomer.node.put(CARDS, KEY, Card(99), ttl_s=600) >= 2
        for member in swarm.members:
            with trio.fail_after(within_s - (trio.current_time() - started)):
                while newcomer.id not in await member.node.get(CARDS, KEY):
                    await trio.sleep(0.05)


def ahead(seconds: float) -> float:
    return time.time() + seconds


async def test_liars_move_no_clock_and_members_correct_a_wrong_one() -> None:
    async with run_of(4, is_open=True) as (swarm, trusted), besieged(swarm, 10, HOUR_S):
        for _ in range(3):
            for member in swarm.members:
                await member.node.get(CARDS, KEY)
        assert [member.node.now() - time.time() for member in swarm.members] == pytest.approx([0.0] * 4, abs=60.0)
        assert [member.node._router.clock.correction_s for member in swarm.members] == [0.0] * 4

        def prepare(host: Host) -> None:
            guard(host, members=trusted)

        for off_s in (-300.0, -HOUR_S):
            wall = partial(ahead, off_s)
            wrong = await swarm.add([swarm.members[0].address], tuning=CALM, wall=wall, prepare=prepare)
            for other in trusted - wrong.node.peers:
                await wrong.facts.wait("dht_peer_found", peer=other)
            await wrong.node.get(CARDS, KEY)
            assert wrong.node.now() == pytest.approx(time.time(), abs=60.0)
            assert wrong.facts.all("dht_clock_wrong")
            assert await wrong.node.put(CARDS, KEY, Card(1), ttl_s=30) >= 4


async def _count(listener: trio.socket.SocketType, dials: list[float]) -> None:
    while True:
        stream, _ = await listener.accept()
        dials.append(trio.current_time())
        stream.close()


@pytest.mark.parametrize("members", [2, 5])
async def test_claimed_addresses_have_no_third_party_dialled(monkeypatch: pytest.MonkeyPatch, members: int) -> None:
    """100 claims of a port that is another's, told by ten identities that stay long enough to be dialled back."""
    monkeypatch.setattr("dht.router.VERIFY_AFTER_S", 0.5)
    with trio.socket.socket() as listener:
        await listener.bind(("127.0.0.1", 0))
        listener.listen(64)
        elsewhere = f"/ip4/127.0.0.1/tcp/{listener.getsockname()[1]}"
        far = "/ip4/192.168.77.1/tcp/80"
        dials: list[float] = []
        async with run_of(members, is_open=True) as (swarm, _), trio.open_nursery() as nursery:
            nursery.start_soon(_count, listener, dials)
            told = count()
            for _ in range(10):
                async with bare_host() as liar:
                    guard(liar)
                    for member in swarm.members:
                        await liar.connect_address(member.address, timeout_s=60)
                        for _ in range(CLAIMS // 10 // members):
                            claim = FindRequest(RUN, (f"{elsewhere}/p2p/{liar.peer_id}", far), bytes(32))
                            reply = await liar.rpc.call(member.id, FIND, claim, timeout_s=60)
                            assert not {contact.peer for contact in reply.body.nodes} - {m.id for m in swarm.members}
                            next(told)
                        assert far not in member.host.book.get(liar.peer_id)
                    await trio.sleep(0.7)  # longer than a member waits before it dials back: it must not
                for member in swarm.members:
                    await member.node.get(CARDS, KEY)
            assert next(told) == CLAIMS
            assert len(dials) <= 2, "by all members together"
            nursery.cancel_scope.cancel()


async def test_a_stranger_that_is_where_it_says_is_told_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dht.router.VERIFY_AFTER_S", 0.5)
    async with run_of(2, is_open=True) as (swarm, trusted):
        invite = [swarm.members[0].address]
        one, two = [
            await swarm.add(invite, tuning=BRISK, prepare=lambda host: guard(host, members=trusted)) for _ in range(2)
        ]
        await one.facts.wait("dht_peer_found", peer=two.id)
        await two.facts.wait("dht_peer_found", peer=one.id)
        for stranger in (one, two):
            assert await stranger.node.put(CARDS, KEY, Card(5), ttl_s=600) == 4
