"""Turns at sending: who waits, in which order, and that nobody waits for ever."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from peer.turns import AT_ONCE, STALLED_S, Turns


async def test_they_come_in_order_and_so_many_at_once() -> None:
    turns, log, gates = Turns(), list[int](), [trio.Event() for _ in range(6)]

    async def send(number: int) -> None:
        async with turns.turn():
            log.append(number)
            await gates[number].wait()

    async with trio.open_nursery() as nursery:
        for number in range(len(gates)):
            nursery.start_soon(send, number)
            await wait_all_tasks_blocked()
        for number, gate in enumerate(gates):
            assert log == list(range(min(number + AT_ONCE, len(gates))))
            gate.set()
            await wait_all_tasks_blocked()


async def test_a_sender_that_is_cancelled_gives_its_turn_back_and_one_that_waits_takes_none() -> None:
    turns, scopes = Turns(), [trio.CancelScope() for _ in range(AT_ONCE + 1)]

    async def stay(scope: trio.CancelScope) -> None:
        with scope:
            async with turns.turn():
                await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for scope in scopes:
            nursery.start_soon(stay, scope)
            await wait_all_tasks_blocked()
        for scope in reversed(scopes):
            scope.cancel()
        await wait_all_tasks_blocked()
        for _ in range(2 * AT_ONCE):
            async with turns.turn():
                await trio.lowlevel.checkpoint()


async def test_where_those_before_make_no_way_a_sender_goes_without(autojump_clock: MockClock) -> None:
    turns = Turns()

    async def stay() -> None:
        async with turns.turn():
            await trio.sleep_forever()

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(stay)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        async with turns.turn():
            assert STALLED_S <= trio.current_time() - began < 2 * STALLED_S
        nursery.cancel_scope.cancel()
    async with turns.turn():  # and took nobody's
        assert trio.current_time() - began < 2 * STALLED_S
