"""A replica that was frozen, cut off or slow asks before it counts what its caller may have sent to another one."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import trio
import trio.testing

from peer.net.host import Host
from peer.net.method import Call
from swarm.pipeline.config import PipelineSettings
from swarm.pipeline.duplicate_checks import BACKLOG_S, SURE_S, find_holder, still_waits
from swarm.pipeline.messages import STILL_WAITING, ForwardReply, ForwardRequest, StillWaitingQuery, StillWaitingReply
from swarm.pipeline.micro_batch import MicroBatchResult, MicroBatchTask
from tests.peer.support.worker_harness import freeze
from tests.swarm.support.pipeline_children import open_children
from tests.swarm.support.pipeline_harness import (
    HIDDEN_BYTES,
    MICRO,
    Replica,
    Table,
    ids_of,
    open_impostor,
    open_replica,
    open_replicas,
    pass_to,
    rules_of,
    serving,
    spans,
    tokens_of,
    without_haste,
)

pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="stages run in worker processes, supervised through /proc"),
]
SPANS = spans(0, 4)
STANDSTILL_S = 0.8


@pytest.fixture(autouse=True)
def nobody_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing answer means no; here every peer has time to answer."""
    without_haste(monkeypatch)


@dataclass
class Caller:
    """A caller by hand that answers with `waits` whether it still waits."""

    host: Host
    waits: bool = True
    asked: list[tuple[int, int]] = field(default_factory=list)
    meanwhile: Callable[[], Awaitable[object]] = trio.lowlevel.checkpoint

    async def on_awaited(self, call: Call[StillWaitingQuery]) -> StillWaitingReply:
        self.asked.append(call.body.samples)
        await self.meanwhile()
        return StillWaitingReply(self.waits)


@asynccontextmanager
async def open_caller(rules: PipelineSettings) -> AsyncIterator[Caller]:
    async with open_impostor(rules, 0, {}, None) as host:
        caller = Caller(host)
        host.rpc.register(STILL_WAITING, caller.on_awaited)
        yield caller


async def send(host: Host, rules: PipelineSettings, peer: str, stage: int, span: tuple[int, int]) -> ForwardReply:
    return await pass_to(host, rules, peer, stage, ids_of(span) + bytes(HIDDEN_BYTES), samples=span)


async def test_thawed_replica_asks_before_it_counts(tmp_path: Path) -> None:
    """It freezes before a backward. Its caller is still connected, but waits no more."""
    rules = rules_of(2)
    async with (
        open_caller(rules) as caller,
        open_children(tmp_path, 2, 1, ["stop:pipeline_backward:2"]) as [child],
    ):
        assert await child.ask(json.dumps({child.peer: child.hello})) == {"serving": True}
        caller.host.book.add(child.peer, child.hello["addresses"])
        answers: list[ForwardReply] = []

        async def call(span: tuple[int, int]) -> None:
            answers.append(await send(caller.host, rules, child.peer, 1, span))

        await call(SPANS[0])
        caller.waits = False
        async with trio.open_nursery() as nursery:
            nursery.start_soon(call, SPANS[1])
            await child.stopped()
            await trio.sleep(STANDSTILL_S)
            child.thaw()
        assert [answer.outcome for answer in answers] == ["done", "later"]
        assert caller.asked[-1] == SPANS[1] and set(await child.counted()) == {SPANS[0]}
        caller.waits = True
        await call(SPANS[1])
        assert answers[-1].outcome == "done" and set(await child.counted()) == {*SPANS[:2]}


@dataclass
class Middle:
    """A replica of stage 1 of 3 between two impostors. Each item of `answers` lets one answer out of stage 2."""

    replica: Replica
    caller: Caller
    last: Host
    rules: PipelineSettings
    passes: trio.MemoryReceiveChannel[ForwardRequest]
    answers: trio.MemorySendChannel[None]
    outcomes: list[str] = field(default_factory=list)

    async def take(self, span: tuple[int, int], nursery: trio.Nursery) -> ForwardRequest:
        """Send the replica a micro-batch; return its request to stage 2, which has not answered yet."""
        nursery.start_soon(self._call, span)
        return await self.passes.receive()

    async def _call(self, span: tuple[int, int]) -> None:
        self.outcomes.append((await send(self.caller.host, self.rules, self.replica.peer, 1, span)).outcome)


@asynccontextmanager
async def open_middle(folder: Path) -> AsyncIterator[Middle]:
    rules, table = rules_of(3), Table()
    passes_in, passes = trio.open_memory_channel[ForwardRequest](8)
    answers, answers_out = trio.open_memory_channel[None](8)

    async def answer(request: ForwardRequest, payload: memoryview) -> tuple[ForwardReply, bytes]:
        await passes_in.send(request)
        await answers_out.receive()
        return ForwardReply("done", loss=1.0), bytes(HIDDEN_BYTES)

    async with (
        open_replica(folder, 3, 1) as replica,
        open_impostor(rules, 2, table, answer) as last,
        open_caller(rules) as caller,
        replica.serving(rules, table),
    ):
        caller.host.book.add(replica.peer, replica.host.addresses)
        yield Middle(replica, caller, last, rules, passes, answers)


async def test_suspicion_is_confirmed_before_counting(tmp_path: Path) -> None:
    async with open_middle(tmp_path) as middle:
        caller, accounting, began = middle.caller, middle.replica.server.accounting, trio.current_time()
        for span, asks, waits, outcome in (
            (SPANS[0], False, True, "done"),
            (SPANS[1], True, True, "done"),
            (SPANS[2], True, False, "later"),
        ):
            caller.waits = waits
            async with trio.open_nursery() as nursery:
                await middle.take(span, nursery)
                if asks:
                    group, replica = middle.rules.groups[1], middle.replica.peer
                    assert await find_holder(caller.host, group, span, [replica], timeout_s=60) is None
                await middle.answers.send(None)
            assert middle.outcomes[-1] == outcome
        assert caller.asked[-2:] == SPANS[1:3]
        if middle.replica.host.stood_still_until < began - BACKLOG_S and trio.current_time() - began < SURE_S:
            assert len(caller.asked) == 2, "what came in time is not asked about"
        assert accounting.counted == ((SPANS[0][0], SPANS[1][1]),)
        assert (await middle.replica.worker_group.read_gradient()).micro_batches == ("0", str(MICRO))


async def test_repeated_questions_do_not_prevent_counting(tmp_path: Path) -> None:
    """A stranger asks for the micro-batch whenever it is about to be counted."""
    async with open_middle(tmp_path) as middle, open_impostor(middle.rules, 2, {}, None) as stranger:
        caller, group, peer = middle.caller, middle.rules.groups[1], middle.replica.peer
        stranger.book.add(peer, middle.replica.host.addresses)

        async def ask() -> None:
            assert await find_holder(stranger, group, SPANS[0], [peer], timeout_s=60) is None

        caller.meanwhile = ask
        async with trio.open_nursery() as nursery:
            await middle.take(SPANS[0], nursery)
            await ask()
            await middle.answers.send(None)
        assert caller.asked and middle.outcomes == ["done"]


async def test_still_waiting_needs_all_senders_before(tmp_path: Path) -> None:
    """Only the called peer is told so, by the number of its call."""
    async with open_middle(tmp_path) as middle, open_impostor(middle.rules, 2, {}, None) as stranger:
        peer, last = middle.replica.peer, middle.last
        stranger.book.add(peer, middle.replica.host.addresses)
        async with trio.open_nursery() as nursery:
            request = await middle.take(SPANS[0], nursery)
            for asker, span, ticket, waits, still in (
                (last, SPANS[0], request.ticket, True, True),
                (last, SPANS[0], request.ticket, False, False),
                (last, SPANS[1], request.ticket, True, False),
                (last, SPANS[0], request.ticket + 1, True, False),
                (stranger, SPANS[0], request.ticket, True, False),
            ):
                middle.caller.waits = waits
                assert await still_waits(asker, peer, span, ticket) is still
            await middle.answers.send(None)
        assert await still_waits(last, peer, SPANS[0], request.ticket) is False, "it has its answer"
        assert middle.outcomes == ["done"]


async def test_micro_batch_in_its_backward_is_counted(tmp_path: Path) -> None:
    """The answer comes at once, however long the worker takes."""
    async with open_middle(tmp_path) as middle:
        replica, accounting = middle.replica, middle.replica.server.accounting
        worker = replica.worker_group.worker_pid
        assert worker is not None
        async with trio.open_nursery() as nursery:
            await middle.take(SPANS[0], nursery)
            freeze(worker)
            await middle.answers.send(None)
            with trio.fail_after(300):
                while not accounting.is_at(SPANS[0]):
                    await trio.sleep(0.01)
            group = middle.rules.groups[1]
            assert await find_holder(middle.caller.host, group, SPANS[0], [replica.peer], timeout_s=60) == replica.peer
            assert not accounting.counted
            os.kill(worker, signal.SIGCONT)
        assert middle.outcomes == ["done"] and accounting.counted == (SPANS[0],)


async def test_throwing_away_matches_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One micro-batch is in its backward then, and is forgotten with the rest. One comes back meanwhile, and is
    refused."""
    async with open_middle(tmp_path) as middle:
        replica, accounting = middle.replica, middle.replica.server.accounting
        worker = replica.worker_group.worker_pid
        assert worker is not None
        runner = replica.server.runner
        thrown: list[tuple[list[str], tuple[tuple[int, int], ...]]] = []
        came_back, is_wanted = trio.Event(), runner._is_wanted

        async def watched(task: MicroBatchTask) -> bool:
            wanted = await is_wanted(task)
            if task.samples == SPANS[1]:
                came_back.set()
            return wanted

        monkeypatch.setattr(runner, "_is_wanted", watched)

        async def throw_away() -> None:
            async with replica.server.runner.nothing_counts():
                thrown.append((list((await replica.worker_group.take_gradient()).micro_batches), accounting.forget()))

        async with trio.open_nursery() as nursery:
            await middle.take(SPANS[0], nursery)
            await middle.take(SPANS[1], nursery)
            freeze(worker)
            await middle.answers.send(None)
            with trio.fail_after(300):
                while not accounting.is_at(SPANS[0]):
                    await trio.sleep(0.01)
            nursery.start_soon(throw_away)
            await trio.testing.wait_all_tasks_blocked(0.1)
            await middle.answers.send(None)
            with trio.fail_after(300):
                await came_back.wait()
            assert not thrown
            os.kill(worker, signal.SIGCONT)
        assert sorted(middle.outcomes) == ["done", "later"] and accounting.counted == ()
        assert thrown == [([str(SPANS[0][0])], (SPANS[0],))]


async def test_one_of_two_sources_counts(tmp_path: Path) -> None:
    """The first source asks the other one, after that one has asked for the micro-batch."""
    rules, came, go_on = rules_of(2), trio.Event(), trio.Event()

    async def answer(request: ForwardRequest, payload: memoryview) -> tuple[ForwardReply, bytes]:
        if not came.is_set():
            came.set()
            await go_on.wait()
        return ForwardReply("done", loss=1.0), bytes(HIDDEN_BYTES)

    async with (
        open_replicas(tmp_path, [2, 0]) as stages,
        serving(stages, rules) as table,
        open_impostor(rules, 1, table, answer),
    ):
        slow, quick = stages[0]
        results: list[MicroBatchResult] = []

        async def dispatch(replica: Replica, again: bool) -> None:
            results.append(await replica.source.dispatch_one(SPANS[0], tokens_of(SPANS[0]), again))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(dispatch, slow, False)
            await came.wait()
            await dispatch(quick, True)
            go_on.set()
        assert [(result.done, result.counted) for result in results] == [(True, True), (True, False)]
        assert (quick.server.accounting.counted, slow.server.accounting.counted) == ((SPANS[0],), ())


async def test_source_waits_for_a_repeat_counted_elsewhere(tmp_path: Path) -> None:
    """The next stage has lost it since. It is slow with the second copy, asks, and is to count it."""
    rules = rules_of(2)
    sources: list[Replica] = []

    async def answer(request: ForwardRequest, payload: memoryview) -> tuple[ForwardReply, bytes]:
        if not await still_waits(last, sources[-1].peer, request.samples, request.ticket):
            return ForwardReply("later", "worker", begun=True), b""
        return ForwardReply("done", loss=1.0), bytes(HIDDEN_BYTES)

    async with (
        open_replicas(tmp_path, [2, 0]) as stages,
        serving(stages, rules) as table,
        open_impostor(rules, 1, table, answer) as last,
    ):
        for replica, again in zip(stages[0], (False, True), strict=True):
            last.book.add(replica.peer, replica.host.addresses)
            sources.append(replica)
            with trio.fail_after(300):
                result = await replica.source.dispatch_one(SPANS[0], tokens_of(SPANS[0]), again)
            assert (result.done, result.counted) == (True, not again)
