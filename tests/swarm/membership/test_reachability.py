"""Whether a peer takes part as a client follows from what others find that dial it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from peer.errors import RoundError
from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.rpc import Call
from swarm.membership import reachability
from swarm.membership.member_record import member_record
from swarm.membership.reachability import DIAL_BACK, DialBackReply, DialBackRequest, DialWatch, Outcome, tcp_ports
from swarm.protocol.head import genesis

SOON = 30

Answers = list[Outcome | None]
"""What each of the other peers says of every port; None: it answers with an error."""


@asynccontextmanager
async def peers(answers: Answers) -> AsyncIterator[tuple[Host, list[Event]]]:
    """A host with its events, connected to others that say what their place in `answers` holds at the time."""
    seen, members = list[Event](), list[str]()
    async with AsyncExitStack() as stack:
        for place in range(len(answers) + 1):
            events = EventLog(watch=seen.append if not place else None)
            host = await stack.enter_async_context(open_host(identity=Identity.generate(), events=events))
            if not place:
                first = host
            else:
                answer_with(host, answers, place - 1)
                members.append(host.peer_id)
                first.admissions.trust("head", members)
                await first.connect_address(host.addresses[0], timeout_s=SOON)
        yield first, seen


def answer_with(host: Host, answers: Sequence[Outcome | None], place: int) -> None:
    async def answer(call: Call[DialBackRequest]) -> DialBackReply:
        outcome = answers[place]
        if outcome is None:
            raise RoundError("this peer is busy")
        return DialBackReply("203.0.113.7", tuple((port, outcome) for port in call.body.ports))

    host.rpc.register(DIAL_BACK, answer)


async def until(host: Host, is_client: bool) -> None:
    with trio.fail_after(SOON):
        while host.traversal.is_client != is_client:
            changed = trio.Event()
            host.traversal.changed = changed.set
            await changed.wait()


async def test_a_peer_that_nobody_can_dial_announces_no_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reachability, "LOOK_AGAIN_S", 0.05)
    answers: Answers = ["timeout", "refused"]
    async with peers(answers) as (host, seen), trio.open_nursery() as nursery:
        listens = host.addresses
        nursery.start_soon(DialWatch(host).run)
        await until(host, True)
        head = genesis("run", bytes(32))
        record = member_record(host, head, session="s", name="n", role="full", phase="", joined_at=0.0)
        assert listens and host.addresses == () and record.client and record.addresses == []
        answers[1] = "open"
        await until(host, False)
        assert host.addresses == listens
        assert [e.name for e in seen if e.name.startswith("client")] == ["client_mode", "client_mode_ended"]
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("answers", "is_open"),
    [
        (["timeout", "open"], True),
        (["refused", "open", None], True),
        (["timeout", "unreachable"], False),
        (["timeout"], False),
        (["timeout", None], None),
        ([None], None),
        ([], None),
    ],
)
async def test_one_that_can_dial_it_is_enough_and_one_of_two_that_cannot_is_not(
    answers: Answers, is_open: bool | None
) -> None:
    async with peers(answers) as (host, _):
        assert await DialWatch(host).is_open() is is_open


async def test_a_neighbour_counts_only_where_fewer_than_two_others_are_connected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It dials within the home, so a peer behind a NAT took turns as a client and as one that merges."""
    async with peers(["open", "timeout", "timeout"]) as (host, _):
        assert await DialWatch(host).is_open() is True, "all are neighbours"
        others = sorted(host.connected)
        replies = {peer: await host.rpc.call(peer, DIAL_BACK, DialBackRequest((5,)), timeout_s=SOON) for peer in others}
        near = next(peer for peer, reply in replies.items() if reply.body.outcomes[0][1] == "open")
        monkeypatch.setattr(host, "remote_ip", lambda peer: "192.168.1.7" if peer == near else "203.0.113.9")
        assert await DialWatch(host).is_open() is False
        coordinator = next(peer for peer in others if peer != near)
        monkeypatch.setattr(host, "remote_ip", lambda peer: "203.0.113.9" if peer == coordinator else "192.168.1.7")
        assert await DialWatch(host).is_open() is True, "all members are in one home, the coordinator is not"


async def test_strangers_make_no_peer_a_client() -> None:
    async with peers(["timeout", "timeout"]) as (host, _):
        host.admissions.trust("head", ["another"])
        assert await DialWatch(host).is_open() is None


async def test_who_has_a_mapped_port_is_no_client() -> None:
    """The router's port may be another than the one at which it listens, which others have tried in vain."""
    async with peers([]) as (host, _):
        host.traversal.set_client(True)
        host.traversal.mapped = ("/ip4/203.0.113.7/tcp/4001",)
        assert not host.traversal.is_client and host.addresses[0].startswith("/ip4/203.0.113.7/tcp/4001")


async def test_a_client_by_choice_asks_nobody() -> None:
    async with peers([]) as (host, _):
        await DialWatch(host, always=True).run()
        assert host.traversal.is_client and host.addresses == ()


def test_ports_are_those_of_tcp_and_few() -> None:
    many = [f"/dns4/a/tcp/{port}" for port in range(9, 19)]
    assert tcp_ports(["/ip4/1.2.3.4/tcp/5", "/ip4/1.2.3.4/udp/6/quic-v1", "/ip4/9.9.9.9/tcp/5", *many]) == (
        5,
        9,
        10,
        11,
    )
