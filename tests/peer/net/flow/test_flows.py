"""Flows that others open at one host: however many keys of one address prefix come, others get theirs at once."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
import trio
import trio.testing

from peer.net.admissions import Admissions
from peer.net.flow.flows import FLOWS_MAX, FLOWS_PER_PEER_MAX, Flows
from peer.net.rate_limit import Meter, TokenBucket
from tests.peer.support.flow_talk import Talk

KEYS = FLOWS_MAX // FLOWS_PER_PEER_MAX


class QuietWire:
    """Nothing ever comes over it."""

    def __init__(self) -> None:
        self.closed = False

    def send_now(self, view: memoryview) -> int:
        return len(view)

    async def receive_into(self, view: memoryview) -> int:
        await trio.sleep_forever()
        raise AssertionError

    def close(self) -> None:
        self.closed = True


class Door:
    """The flows of a host that sees each peer at the prefix which its name begins with."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self._nursery, self.admissions = nursery, Admissions()
        self.admissions.guard()
        meter = Meter(TokenBucket(None), TokenBucket(None))
        parts: Any = SimpleNamespace(meter=meter, admissions=self.admissions, prefix=lambda peer: peer.split()[0])
        dial: Any = None  # it opens none
        self.flows = Flows(nursery, dial, parts, tuple)
        self.flows.serve(Talk())

    async def come(self, peer: str, access: Any = "client") -> QuietWire:
        """Let a peer open a flow. Its wire is closed if it gets none."""
        self.admissions.grant(peer, access, trusted=False)
        wire: Any = QuietWire()
        self._nursery.start_soon(self.flows.accept, peer, wire)
        await trio.testing.wait_all_tasks_blocked()
        return wire


@pytest.fixture
async def door(mock_clock: trio.testing.MockClock) -> AsyncIterator[Door]:
    """No time passes: a flow comes to rest after some."""
    async with trio.open_nursery() as nursery:
        yield Door(nursery)
        nursery.cancel_scope.cancel()


async def full(door: Door) -> list[QuietWire]:
    """Let the keys of one prefix take all flows."""
    wires = [await door.come(f"theirs {number % KEYS}") for number in range(FLOWS_MAX)]
    assert not any(wire.closed for wire in wires)
    return wires


async def test_clients_of_another_prefix_get_flows_where_many_keys_of_one_hold_all(door: Door) -> None:
    theirs = await full(door)
    late = await door.come("theirs late")
    assert late.closed, "none of that prefix is at rest"
    others = [await door.come(f"other{number} one") for number in range(20)]
    assert not any(wire.closed for wire in others) and sum(wire.closed for wire in theirs) == 20


async def test_flows_of_servers_are_never_refused_because_of_clients(door: Door) -> None:
    theirs = await full(door)
    servers = [await door.come(f"theirs server{number}", "member") for number in range(20)]
    more = [await door.come(f"other{number} one") for number in range(20)]
    assert not any(wire.closed for wire in (*servers, *more)) and sum(wire.closed for wire in theirs) == 40
