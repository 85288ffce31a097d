"""Turns at sending: who waits, in which order, and that nobody waits for ever."""

from __future__ import annotations

import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from peer.turns import AT_ONCE, STALLED_S, WAIT_MAX_S, Turns


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


async def test_while_those_before_make_way_all_keep_their_places(autojump_clock: MockClock) -> None:
    turns, log, began = Turns(), list[tuple[str, float]](), trio.current_time()

    async def send(name: str, pieces: int) -> None:
        async with turns.turn() as held:
            log.append((name, trio.current_time() - began))
            assert held
            for _ in range(pieces):
                await trio.sleep(STALLED_S / 2)
                turns.moved()

    async with trio.open_nursery() as nursery:
        for name in ("a", "b", "c", "d"):
            nursery.start_soon(send, name, 4)
            await wait_all_tasks_blocked()
        await trio.sleep(STALLED_S / 2)
        nursery.start_soon(send, "late", 1)
    assert dict(log) == {"a": 0.0, "b": 0.0, "c": 2 * STALLED_S, "d": 2 * STALLED_S, "late": 4 * STALLED_S}


async def test_nobody_waits_for_long_even_so(autojump_clock: MockClock) -> None:
    turns = Turns()

    async def send_on() -> None:
        async with turns.turn():
            while True:
                await trio.sleep(STALLED_S / 2)
                turns.moved()

    async with trio.open_nursery() as nursery:
        for _ in range(AT_ONCE):
            nursery.start_soon(send_on)
        await wait_all_tasks_blocked()
        began = trio.current_time()
        async with turns.turn() as held:
            assert not held and trio.current_time() - began == WAIT_MAX_S
        nursery.cancel_scope.cancel()
