"""Turns: strangers' work waits until nothing else is to be done, goes round, and is never put off for good."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from peer.net.admissions import Admissions
from peer.net.strangers import turns as module
from peer.net.strangers.turns import IdleTurns


def guarded() -> Admissions:
    admissions = Admissions()
    admissions.guard()
    admissions.grant("client", "client", trusted=False)
    admissions.grant("other", "client", trusted=False)
    admissions.grant("member", "member", trusted=True)
    return admissions


@asynccontextmanager
async def given(admissions: Admissions | None = None) -> AsyncIterator[tuple[IdleTurns, trio.Nursery]]:
    turns = IdleTurns(guarded() if admissions is None else admissions)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(turns.run)
        await wait_all_tasks_blocked()
        yield turns, nursery
        nursery.cancel_scope.cancel()


async def take(turns: IdleTurns, group: str, peer: str | None, taken: list[str]) -> None:
    await turns.take(group, peer)
    taken.append(f"{peer}@{group}")


async def test_a_turn_comes_when_no_task_can_run_and_then_one_only() -> None:
    steps: list[str] = []
    async with given() as (turns, nursery):

        async def stranger(name: str) -> None:
            await turns.take(name)
            steps.append(name)
            for _ in range(3):  # what its turn is for
                await trio.lowlevel.checkpoint()
            steps.append(name)

        async def member() -> None:
            for _ in range(5):
                await trio.lowlevel.checkpoint()
            steps.append("member")

        nursery.start_soon(stranger, "a")
        nursery.start_soon(stranger, "b")
        nursery.start_soon(member)
        await wait_all_tasks_blocked(0.001)
    assert steps in (["member", "a", "a", "b", "b"], ["member", "b", "b", "a", "a"])


async def test_turns_go_round_between_classes_and_networks() -> None:
    taken: list[str] = []
    async with given() as (turns, _), trio.open_nursery() as waiting:
        for group, peer in [*[("a", None)] * 4, *[("a", "client")] * 3, ("b", None), ("b", "other")]:
            waiting.start_soon(take, turns, group, peer, taken)
    clients = [one for one in taken if "None" not in one]
    strangers = [one for one in taken if "None" in one]
    assert len(taken) == 9
    assert "other@b" in clients[:2] and "None@b" in strangers[:2], taken
    assert all(("None" in first) != ("None" in second) for first, second in pairwise(taken[:8]))


async def test_trusted_peers_wait_for_no_turn() -> None:
    turns = IdleTurns(guarded())
    turns._running = True  # but no turn is ever given
    with trio.fail_after(300):
        await turns.take("a", "member")
        await IdleTurns(Admissions()).take("a", None)
    with trio.move_on_after(0.01) as waited:
        await turns.take("a", "client")
    assert waited.cancelled_caught


async def test_who_gives_up_its_turn_leaves_no_trace() -> None:
    turns = IdleTurns(guarded())
    turns._running = True
    with trio.move_on_after(0):
        await turns.take("a")
    assert not turns._strangers and not turns._give()


async def test_a_busy_loop_does_not_put_strangers_off_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "STARVED_S", 0.001)
    async with given() as (turns, nursery):

        async def busy() -> None:
            while True:
                await trio.lowlevel.checkpoint()

        nursery.start_soon(busy)
        with trio.fail_after(300):
            for _ in range(3):
                await turns.take("a")


async def test_no_peer_waits_once_turns_are_given_no_more() -> None:
    taken: list[str] = []
    turns = IdleTurns(guarded())
    async with trio.open_nursery() as nursery:
        with trio.CancelScope() as scope:
            scope.cancel()
            nursery.start_soon(take, turns, "a", None, taken)
            await turns.run()
        with trio.fail_after(300):
            await turns.take("b")
    assert taken
