"""Which connections a pace goes to, and that the kernel holds it."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from math import inf
from typing import Any, cast

import pytest
import trio

from peer.events import EventLog
from peer.identity import Identity
from peer.net.flow.flows import Pacer
from peer.net.flow.pacing import FlowPace
from peer.net.host import open_host
from tests.peer.net.test_rpc import ECHO, Number, echo


@dataclass(eq=False)
class Connection:
    acked: int = 0
    paces: list[float] = field(default_factory=list)

    def acked_bytes(self) -> int:
        return self.acked

    def pace(self, bytes_per_s: float) -> None:
        self.paces.append(bytes_per_s)


@dataclass(eq=False)
class Held:
    """A flow."""

    wants: float
    idle_since: float | None = None
    round_trips: tuple[float, ...] = ()


def pacer_of(flows: list[Held], connections: list[Connection], monkeypatch: pytest.MonkeyPatch) -> Pacer:
    pacer = Pacer(lambda: cast(Any, flows), lambda: cast(Any, connections))
    for flow in flows:
        pace = FlowPace()
        monkeypatch.setattr(pace, "step", lambda *_, flow=flow: flow.wants)
        pacer._paces[cast(Any, flow)] = pace
    return pacer


async def test_connections_that_send_share_the_lowest_pace_and_others_may_begin_at_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flows, connections = [Held(4e6), Held(1e6), Held(inf)], [Connection() for _ in range(4)]
    pacer = pacer_of(flows, connections, monkeypatch)
    pacer._step()
    for connection, count in zip(connections, (900, 50, 50, 0), strict=True):
        connection.acked += count
    pacer._step()
    assert [connection.paces[-1] for connection in connections] == pytest.approx([0.9e6, 1e6 / 3, 1e6 / 3, 1e6])


async def test_the_pace_ends_with_the_use_of_the_flow(monkeypatch: pytest.MonkeyPatch) -> None:
    flows, connections = [Held(1e6)], [Connection()]
    pacer = pacer_of(flows, connections, monkeypatch)
    assert pacer._step() and connections[0].paces == [1e6]
    flows[0].idle_since = 0.0
    assert not pacer._step() and connections[0].paces == [1e6, inf]
    assert not pacer._step() and connections[0].paces == [1e6, inf]  # nothing to do


async def test_a_flow_that_asks_for_no_pace_leaves_the_kernel_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    flows, connections = [Held(inf)], [Connection()]
    pacer = pacer_of(flows, connections, monkeypatch)
    assert pacer._step() and not connections[0].paces


async def test_a_connection_is_paced_and_tells_what_has_arrived() -> None:
    payload = bytes(1 << 20)
    async with (
        open_host(identity=Identity.generate(), events=EventLog()) as a,
        open_host(identity=Identity.generate(), events=EventLog()) as b,
    ):
        b.rpc.register(ECHO, echo)
        await a.connect_address(b.addresses[0], timeout_s=60)
        await a.rpc.call(b.peer_id, ECHO, Number(1), payload, timeout_s=60, bulk=True)
        (connection,) = a._bulk.sockets
        before = connection.acked_bytes()
        connection.pace(4e6)
        with trio.fail_after(300):
            await a.rpc.call(b.peer_id, ECHO, Number(1), payload, timeout_s=60, bulk=True)
        connection.pace(inf)
        await a.rpc.call(b.peer_id, ECHO, Number(1), payload, timeout_s=60, bulk=True)
        if sys.platform == "linux":
            assert before >= len(payload) and connection.acked_bytes() >= before + 2 * len(payload)
            assert connection._socket.getsockopt(1, 47, 8) == b"\xff" * 8  # SO_MAX_PACING_RATE of SOL_SOCKET
    assert connection.acked_bytes() == 0
    connection.pace(1.0)  # nothing happens once it has ended
