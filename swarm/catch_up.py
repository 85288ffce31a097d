"""Catching up without fetching the state: the merged results of the rounds one has missed.

A peer that holds an earlier state applies the results that led on from it. They are a fraction of the state's
size, and nothing in them has to be believed: only the right ones lead to the state hash that a quorum
advertises.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import trio

from peer.errors import NetworkError, ProtocolViolation
from peer.rpc import Reply, Rpc
from swarm.state import AskResult, ResultPart, StateMethods

PARTS_AT_ONCE: Final = 3
PART_S: Final = 60.0
BUSY_PAUSE_S: Final = 0.5


@dataclass(frozen=True)
class Step:
    """One round's merged result: the encoded `parts` in order, and the state they are said to lead to."""

    leads_to: bytes
    head: bytes
    parts: tuple[memoryview, ...]


async def fetch_results(
    rpc: Rpc,
    donors: Iterable[str],
    methods: StateMethods,
    after: bytes,
    until: bytes,
    steps_max: int,
    parts_max: int,
    timeout_s: float,
) -> list[Step]:
    """The results that lead from the state `after` to the state `until`, at most `steps_max` of `parts_max`
    parts.

    Each donor is tried in turn. NetworkError if none of them has the whole way: then the state must be
    fetched. Apply the steps and compare the state hash at the end; if it differs, that donor lied and another
    way must be taken.
    """
    with trio.move_on_after(timeout_s):
        for donor in donors:
            try:
                return await _walk(rpc, donor, methods, after, until, steps_max, parts_max)
            except (NetworkError, ProtocolViolation):
                continue
    raise NetworkError("No donor keeps the results of all the rounds that were missed.")


async def _walk(
    rpc: Rpc, donor: str, methods: StateMethods, after: bytes, until: bytes, steps_max: int, parts_max: int
) -> list[Step]:
    steps: list[Step] = []
    while after != until:
        if len(steps) == steps_max:
            raise NetworkError(f"{donor} knows only a way that is too long")
        step = await _step(rpc, donor, methods, after, parts_max)
        steps.append(step)
        after = step.leads_to
    return steps


async def _step(rpc: Rpc, donor: str, methods: StateMethods, after: bytes, parts_max: int) -> Step:
    first = await _part(rpc, donor, methods, AskResult(after, 0))
    if not 1 <= first.body.parts <= parts_max:
        raise ProtocolViolation(f"{donor} offers a result of {first.body.parts} parts")
    parts: list[memoryview] = [first.payload] + [memoryview(b"")] * (first.body.parts - 1)
    left = iter(range(1, first.body.parts))
    failures: list[NetworkError | ProtocolViolation] = []

    async def fill(scope: trio.CancelScope) -> None:
        for index in left:
            try:
                parts[index] = (await _part(rpc, donor, methods, AskResult(after, index))).payload
            except (NetworkError, ProtocolViolation) as error:
                failures.append(error)
                scope.cancel()

    async with trio.open_nursery() as nursery:
        for _ in range(PARTS_AT_ONCE):
            nursery.start_soon(fill, nursery.cancel_scope)
    if failures:
        raise failures[0]
    return Step(first.body.leads_to, first.body.head, tuple(parts))


async def _part(rpc: Rpc, donor: str, methods: StateMethods, ask: AskResult) -> Reply[ResultPart]:
    while True:
        reply = await rpc.call(donor, methods.result, ask, timeout_s=PART_S, bulk=True)
        if reply.body.outcome == "here":
            return reply
        if reply.body.outcome == "gone":
            raise NetworkError(f"{donor} does not keep that result")
        await trio.sleep(BUSY_PAUSE_S)
