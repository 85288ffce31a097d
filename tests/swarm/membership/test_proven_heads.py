"""What a peer that only looks learns of a group's heads, over real sockets: one honest answer is enough, and a lie is
told."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import msgspec
import pytest
import trio

from peer.errors import RemoteError
from peer.events import Event, EventLog
from peer.identity import Identity, sign_body
from peer.net.host import Host, open_host
from swarm.membership.proven_heads import ProvenHead, ask_proven_heads
from swarm.protocol.agreement.config import AgreementConfig, Mode
from swarm.protocol.agreement.messages import ChainLink, VoteBody
from swarm.protocol.agreement.rules.evidence import VOTE
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import HEAD_REPORT, AskHead, HeadReport
from swarm.rounds import group_driver
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.support.driven_group import DrivenGroup, GroupSetting, open_driven_group
from tests.swarm.support.stage_commits import serve_head_report

pytestmark = pytest.mark.slow

WAIT_S = 60.0


class Client:
    """A host of its own, that knows all peers of the group."""

    def __init__(self, host: Host, config: AgreementConfig, events: list[Event]) -> None:
        self.host, self.config, self.events = host, config, events

    async def asks(self, *peers: str, timeout_s: float = WAIT_S) -> list[ProvenHead]:
        return await ask_proven_heads(self.host, self.config, peers, timeout_s)

    @property
    def penalized(self) -> list[object]:
        return [event.fields["peer"] for event in self.events if event.name == "peer_penalized"]


@asynccontextmanager
async def group_and_client(folder: Path, mode: Mode, rounds: int = 3) -> AsyncIterator[tuple[DrivenGroup, Client]]:
    """A group of three that has finished its rounds, and a client."""
    log, seen = EventLog(), list[Event]()
    async with open_driven_group(folder, GroupSetting(mode=mode, rounds=rounds)) as group, AsyncExitStack() as stack:
        for _ in range(3):
            await group.enter(deltas)
        await group.until_round(rounds)
        await group.until(lambda: group.actor.heads and group.actor.heads[-1].round == rounds)
        stack.enter_context(log.subscribed(seen.append))
        host = await stack.enter_async_context(open_host(identity=Identity.generate(), events=log))
        for other in (group.coordinator_host, *(member.host for member in group.members)):
            await host.connect_address(other.addresses[0], timeout_s=WAIT_S)
        yield group, Client(host, group.config(host.peer_id), seen)


async def meet(stack: AsyncExitStack, client: Client) -> Host:
    """Another host that the client knows."""
    config = open_host(identity=Identity.generate(), events=EventLog())
    host = await stack.enter_async_context(config)
    await client.host.connect_address(host.addresses[0], timeout_s=WAIT_S)
    return host


def forged(head: Head, peer: str) -> Head:
    """A later head, of which that peer is the only member."""
    me = Member(peer, "s")
    return msgspec.structs.replace(
        head, round=head.round + 1, previous=head.hash, members=(me,), state_hash=b"lie!" * 8, attempt=0
    )


@pytest.mark.parametrize("mode", ["witness", "required"])
async def test_one_honest_answer_is_enough(tmp_path: Path, mode: Mode) -> None:
    async with group_and_client(tmp_path, mode) as (group, client), AsyncExitStack() as stack:
        last = group.actor.heads[-1]
        members, coordinator = [member.peer for member in group.members], group.coordinator_host.peer_id
        for peer in members:
            [found] = await client.asks(peer)
            assert found.head == last and found.holders == (peer,)
        [found] = await client.asks(coordinator)
        assert found.head == last and found.holders == (), "it proves the head, and has no weights"
        [found] = await client.asks(coordinator, *members)
        assert found.holders == tuple(sorted(members)) and len(found.near) == 4
        assert set(last.members) < set(found.near)

        liars = [await meet(stack, client) for _ in range(5)]
        for host in liars:
            false = forged(last, liars[0].peer_id)
            serve_head_report(host, HeadReport(false, Member(host.peer_id, "s"), "training"))
        names = [host.peer_id for host in liars]
        [found] = await client.asks(*names, members[0])
        assert found.head == last and found.holders == (members[0],)
        assert await client.asks(*names) == [] and client.penalized == [], "who proves nothing is only ignored"


@pytest.mark.parametrize("mode", ["witness", "required"])
async def test_a_lie_is_ignored_and_told(tmp_path: Path, mode: Mode) -> None:
    async with group_and_client(tmp_path, mode) as (group, client), AsyncExitStack() as stack:
        honest = group.members[0]
        proof = honest.driver.group.report().links
        last = proof[-1].head
        liars = []

        async def lies(head: Head, links: Sequence[object], name: str = "") -> None:
            host = await meet(stack, client)
            report = HeadReport(head, Member(name or host.peer_id, "s"), "training", links)  # type: ignore[arg-type]
            serve_head_report(host, report)
            liars.append(host.peer_id)

        false = forged(last, "liar")
        await lies(false, proof)
        await lies(false, (*proof, msgspec.structs.replace(proof[-1], head=false)))
        await lies(last, proof, honest.peer)
        await lies(msgspec.structs.replace(last, run_id="another"), proof)
        [found] = await client.asks(*liars, honest.peer)
        assert found.head == last and found.holders == (honest.peer,)
        assert sorted(client.penalized) == sorted(liars)  # type: ignore[type-var]


class FirstMember:
    """The only founder of a run of three, which signs another history after the first head later on."""

    def __init__(self, group: DrivenGroup) -> None:
        first = group.members[0]
        self.identity, self.me = first.host.identity, first.driver.me
        [self.start] = first.driver.group._node.proof_of(first.heads[0].hash)
        assert self.start.start is not None and self.start.head.members == (self.me,)

    def history(self, rounds: int) -> tuple[ChainLink, ...]:
        links = [self.start]
        for number in range(rounds):
            before = links[-1].head
            state = bytes([number + 1]) * 32
            head = msgspec.structs.replace(
                before, round=before.round + 1, previous=before.hash, state_hash=state, attempt=0
            )
            vote = sign_body(self.identity, VOTE, VoteBody(before.hash, 0, head.hash, self.me))
            links.append(ChainLink(head, votes=(vote,)))
        return tuple(links)


@pytest.mark.parametrize("rounds", [pytest.param(5, marks=pytest.mark.soak), 18])
async def test_who_was_the_only_member_once_proves_no_second_history(tmp_path: Path, rounds: int) -> None:
    """Its proof began at the coordinator's start and had all votes that it needed, and it had more rounds."""
    # A round takes longer than a newcomer takes to fetch its state: else the first member is alone for long.
    setting = GroupSetting(min_peers=1, work_s=0.3, agreement={"poll_s": 0.1})
    async with open_driven_group(tmp_path, setting) as group, AsyncExitStack() as stack:
        await group.enter(deltas)
        await group.until_round(1)
        for _ in range(2):
            await group.enter(deltas)
        await group.until(lambda: all(r.heads and len(r.head.members) == 3 for r in group.members))
        for replica in group.members:
            replica.trainer.work_s = 0.05
        await group.until_round(rounds)
        log, seen = EventLog(), list[Event]()
        stack.enter_context(log.subscribed(seen.append))
        host = await stack.enter_async_context(open_host(identity=Identity.generate(), events=log))
        for other in (group.coordinator_host, group.members[1].host):
            await host.connect_address(other.addresses[0], timeout_s=WAIT_S)
        client = Client(host, group.config(host.peer_id), seen)
        liar, history = await meet(stack, client), FirstMember(group).history(200)
        serve_head_report(liar, HeadReport(history[-1].head, Member(liar.peer_id, "s"), "training", history))
        [control] = await client.asks(liar.peer_id)
        assert control.head == history[-1].head, "alone it is believed: no proof shows that there is no other head"
        honest = group.members[1].peer
        asked = [liar.peer_id, honest]
        found = await client.asks(group.coordinator_host.peer_id, *asked)
        assert found and all(proven.head not in [link.head for link in history[1:]] for proven in found)
        if rounds >= 16:  # the coordinator endorses a head since: its word is then in every honest proof
            await group.until(lambda: group.members[1].driver.group.report().links[0].head.round >= 16)
            found = await client.asks(*asked)
            assert [proven.holders for proven in found] == [(honest,)]
        assert not client.penalized


async def test_the_state_is_held_one_round_longer_than_it_is_the_last(tmp_path: Path) -> None:
    async with group_and_client(tmp_path, "witness") as (group, client), AsyncExitStack() as stack:
        ahead = group.members[0]
        proof = ahead.driver.group.report().links
        last, before = proof[-1].head, proof[-2].head
        behind, silent = await meet(stack, client), await meet(stack, client)
        late = Member(behind.peer_id, "s")
        serve_head_report(behind, HeadReport(before, late, "training", proof[:-1]))
        first, second = await client.asks(behind.peer_id, ahead.peer, silent.peer_id)
        assert (first.head, first.holders) == (last, (ahead.peer,))
        assert (second.head, second.holders) == (before, tuple(sorted((ahead.peer, late.peer))))
        assert set(first.near) == set(second.near) == {late, ahead.driver.me}


async def test_before_the_group_begins_only_its_first_head_is_known(tmp_path: Path) -> None:
    async with open_driven_group(tmp_path, GroupSetting(min_peers=2)) as group, AsyncExitStack() as stack:
        one = await group.enter(deltas)
        config = open_host(identity=Identity.generate(), events=EventLog())
        client = Client(await stack.enter_async_context(config), group.config("client"), [])
        for host in (one.host, group.coordinator_host):
            await client.host.connect_address(host.addresses[0], timeout_s=WAIT_S)
        [found] = await client.asks(one.peer, group.coordinator_host.peer_id)
        assert found.head == group.genesis and found.links == ()
        assert set(found.holders) == {one.peer, group.coordinator_host.peer_id}, "the first state is there, too"


async def test_a_peer_answers_for_its_own_group_only(tmp_path: Path) -> None:
    async with group_and_client(tmp_path, "required", rounds=1) as (group, client):
        peer = group.members[0].peer
        ask = partial(client.host.rpc.call, peer, HEAD_REPORT, timeout_s=WAIT_S)
        assert (await ask(AskHead())).body == (await ask(AskHead(group.genesis.run_id))).body
        with pytest.raises(RemoteError, match="another group"):
            await ask(AskHead("another"))


async def test_a_proof_that_does_not_fit_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with group_and_client(tmp_path, "witness") as (group, client):
        one, other = group.members[:2]
        report = one.driver.group.report()
        monkeypatch.setattr(group_driver, "REPORT_BYTES_MAX", len(msgspec.msgpack.encode(report)) - 1)
        assert one.driver.group.report() == msgspec.structs.replace(report, links=())
        assert one.seen("proof_too_large")
        assert await client.asks(one.peer) == [] and client.penalized == []
        monkeypatch.undo()
        [found] = await client.asks(other.peer)
        assert found.head == report.head


async def test_peers_that_do_not_answer_cost_no_more_than_the_deadline(tmp_path: Path) -> None:
    async with group_and_client(tmp_path, "required", rounds=1) as (group, client), AsyncExitStack() as stack:
        stuck = await meet(stack, client)

        async def never(call: object) -> HeadReport:
            await trio.sleep_forever()
            raise AssertionError

        stuck.rpc.register(HEAD_REPORT, never)
        with trio.fail_after(WAIT_S):  # the one that is stuck never answers
            [found] = await client.asks(stuck.peer_id, group.members[0].peer, timeout_s=2.0)
        assert found.head.round == 1
