"""Calls that wait for one introduction share its failure, of the same kind."""

from __future__ import annotations

import trio
import trio.testing

from peer.errors import BarnraiseError, ConnectionLost, NetworkError, ProtocolViolation
from tests.peer.net.test_rpc import ECHO, Number, hosts


async def outcomes_of_calls_at_once(failure: BarnraiseError) -> list[BarnraiseError]:
    """Return what three calls end with that wait for an introduction which fails so."""
    outcomes: list[BarnraiseError] = []
    async with hosts() as (a, b, _):
        a.admissions.guard()

        async def introduce(peer: str, timeout_s: float) -> None:
            await trio.testing.wait_all_tasks_blocked(0.05)  # the other calls wait for this one by then
            raise failure

        async def call() -> None:
            try:
                await a.rpc.call(b.peer_id, ECHO, Number(1), timeout_s=20)
            except BarnraiseError as error:
                outcomes.append(error)

        a.rpc.introduce = introduce
        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(call)
    return outcomes


async def test_a_peer_that_cannot_be_reached_is_no_liar_to_any_of_the_calls() -> None:
    """A fetch never asks a donor again that broke the protocol; one that was cut off it does."""
    outcomes = await outcomes_of_calls_at_once(ConnectionLost("it is cut off"))
    assert len(outcomes) == 3 and all(isinstance(outcome, NetworkError) for outcome in outcomes), outcomes


async def test_a_peer_that_proves_something_else_is_one_to_all_of_the_calls() -> None:
    outcomes = await outcomes_of_calls_at_once(ProtocolViolation("it is another peer"))
    assert len(outcomes) == 3 and all(isinstance(outcome, ProtocolViolation) for outcome in outcomes), outcomes
