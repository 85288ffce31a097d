"""The source of micro-batches, and its text from feeders."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import torch
import trio

from peer.errors import RemoteError
from peer.events import Event
from peer.net.host import Host
from peer.net.method import Call, Empty
from swarm.pipeline.data_feed import RemoteTokens, serve_tokens
from swarm.pipeline.messages import (
    COUNTED,
    FEED_SAMPLES_MAX,
    REDISPATCH,
    SAMPLE_RANGES_MAX,
    AskCounted,
    AskTokens,
    Counted,
    Redispatch,
    tokens_method,
)
from swarm.pipeline.micro_batch import MicroBatchResult
from swarm.pipeline.source import REFUSALS_MAX, WINDOW_MIN, MicroBatchSource
from swarm.protocol.ledger import Range
from swarm.protocol.plan import RANGES_MAX
from tests.peer.support.stage_harness import MODEL
from tests.swarm.support.pipeline_harness import (
    MICRO,
    SEQ,
    open_impostor,
    open_replicas,
    read_tokens,
    rules_of,
    serving,
    tokens_of,
    without_haste,
)

RULES = rules_of(2)


async def read(spans: Sequence[Range]) -> torch.Tensor:
    return torch.cat([tokens_of(span) for span in spans])


class Local:
    """The local corpus; notes what was read from it."""

    def __init__(self) -> None:
        self.read: list[Range] = []

    async def __call__(self, spans: Sequence[Range]) -> torch.Tensor:
        self.read += spans
        return await read(spans)


async def hosts(stack: AsyncExitStack, count: int) -> list[Host]:
    found = [await stack.enter_async_context(open_impostor(RULES, 0, {}, None)) for _ in range(count)]
    for one in found:
        for other in found:
            one.book.add(other.peer_id, other.addresses)
    return found


async def test_feeders_rotate_and_local_text_is_the_fallback(monkeypatch: pytest.MonkeyPatch) -> None:
    without_haste(monkeypatch)
    monkeypatch.setattr("swarm.pipeline.data_feed.COOLDOWN_S", 600.0)
    async with AsyncExitStack() as stack:
        me, good, gone, wrong_ids, too_few = await hosts(stack, 5)
        serve_tokens(good.rpc, RULES, read)

        def serve(host: Host, ids: torch.Tensor) -> None:
            async def answer(call: object) -> tuple[Empty, memoryview]:
                return Empty(), ids.numpy().astype("<u4").data

            host.rpc.register(tokens_method(RULES), answer)

        serve(wrong_ids, torch.full((MICRO, SEQ + 1), MODEL.vocab_size))
        serve(too_few, torch.zeros(MICRO, SEQ, dtype=torch.int64))
        struck: list[str] = []
        local, feeders = Local(), [host.peer_id for host in (good, gone, wrong_ids, too_few)]
        source = RemoteTokens(me, RULES, lambda: feeders, local)
        with me.events.subscribed(
            lambda event: struck.append(str(event.fields["peer"])) if event.name == "peer_penalized" else None
        ):
            for k in range(8):
                span = (MICRO * k, MICRO * (k + 1))
                assert torch.equal(await source((span,)), tokens_of(span))
        assert sorted(struck) == sorted([wrong_ids.peer_id, too_few.peer_id])
        assert len(local.read) == 3, "each bad feeder was asked once"
        assert torch.equal(await RemoteTokens(me, RULES, list, local)(((4, 6),)), tokens_of((4, 6)))


async def test_feeder_refuses_nonsense() -> None:
    async with AsyncExitStack() as stack:
        me, feeder = await hosts(stack, 2)
        serve_tokens(feeder.rpc, RULES, read)
        method = tokens_method(RULES)
        for request in (
            AskTokens("run", ()),
            AskTokens("run", ((5, 5),)),
            AskTokens("run", ((0, FEED_SAMPLES_MAX + 1),)),
            AskTokens("another run", ((0, 2),)),
        ):
            with pytest.raises(RemoteError, match="samples at once"):
                await me.rpc.call(feeder.peer_id, method, request, timeout_s=60)


async def test_micro_batch_of_any_size_is_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    without_haste(monkeypatch)
    size = FEED_SAMPLES_MAX + 36
    rules = rules_of(2, micro_batch=size)
    async with AsyncExitStack() as stack:
        me, feeder = await hosts(stack, 2)
        serve_tokens(feeder.rpc, rules, read)
        local = Local()
        source = RemoteTokens(me, rules, lambda: [feeder.peer_id], local)
        assert torch.equal(await source(((0, size),)), tokens_of((0, size)))
        assert not local.read
        method = tokens_method(rules)
        with pytest.raises(RemoteError, match=f"ask for 1 to {size}"):
            await me.rpc.call(feeder.peer_id, method, AskTokens("run", ((0, size + 1),)), timeout_s=60)


async def test_scattered_samples_fit_into_one_answer() -> None:
    far = 1 << 52
    counted = tuple((far + 2 * k, far + 2 * k + 1) for k in range(RANGES_MAX))

    async def answer(call: Call[AskCounted]) -> Counted:
        return Counted(counted, counted[:SAMPLE_RANGES_MAX])

    async with AsyncExitStack() as stack:
        me, mate = await hosts(stack, 2)
        mate.rpc.register(COUNTED, answer)
        reply = await me.rpc.call(mate.peer_id, COUNTED, AskCounted("group 1", 0), timeout_s=60)
        assert reply.body.ranges == counted


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="stages run in worker processes, supervised through /proc")
async def test_refused_micro_batch_is_given_up_and_reported(tmp_path: Path) -> None:
    """All that the last stage computes is NaN."""
    async with open_replicas(tmp_path, [1, 1]) as stages:
        first, last = stages[0][0], stages[1][0]
        last.worker_group.outer.fill_(1e15)
        await last.worker_group.import_weights(epoch=0)
        for rules in (RULES, rules_of(2, synchronous=True, round_samples=64)):
            del first.events[:]
            async with serving(stages, rules):
                source = MicroBatchSource(first.server, read_tokens)
                with trio.fail_after(300):
                    async with source.open():
                        await source.dispatch([(4, 12)])
            assert source.totals.abandoned == 4 and first.server.accounting.counted == ()
            told = [event.fields for event in first.seen("pipeline_refused")]
            assert 1 <= len(told) < 4, "not each of them"
            assert 4 <= int(str(told[0]["first"])) == int(str(told[0]["last"])) - MICRO < 12
            assert (told[0]["cause"], told[0]["synchronous"]) == ("not_finite", rules.synchronous)
            assert source.totals.retried == 4 * (REFUSALS_MAX - 1), "after the last refusal it is not tried again"
            assert "NaN" in str(told[0]["reason"])


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="stages run in worker processes, supervised through /proc")
async def test_source_dispatches_and_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_haste(monkeypatch)
    rules = rules_of(2, synchronous=True, round_samples=64)
    async with open_replicas(tmp_path, [1, 1]) as stages, serving(stages, rules):
        first, last = stages[0][0], stages[1][0]

        ended = trio.Event()
        results: list[tuple[Range, bool]] = []

        def on_result(samples: Range, result: MicroBatchResult) -> None:
            results.append((samples, result.counted))
            if len(results) == 2:
                ended.set()

        source = first.listener.source = MicroBatchSource(first.server, read_tokens, on_result)
        async with source.open():
            await source.dispatch([(0, 40), (60, 64)])
            assert first.server.accounting.counted == last.server.accounting.counted == ((0, 40), (60, 64))
            assert WINDOW_MIN <= source.window <= rules.window_max
            assert first.server.load().service_s > 0 and first.server.runner.answer_s > 0

            # A leader asks for two once more: one is counted everywhere already.
            ended = trio.Event()
            results.clear()
            request = Redispatch(rules.groups[0], 0, ((38, 42),))
            await last.host.rpc.call(first.peer, REDISPATCH, request, timeout_s=60)
            await ended.wait()
            assert sorted(results) == [((38, 40), False), ((40, 42), True)]
        totals = first.seen("pipeline_progress")[-1].fields
        assert totals == {"dispatched": 24, "completed": 24, "retried": 0, "abandoned": 0}
        assert last.server.accounting.counted == ((0, 42), (60, 64))


@pytest.mark.process
@pytest.mark.skipif(sys.platform != "linux", reason="stages run in worker processes, supervised through /proc")
async def test_last_progress_event_is_complete(tmp_path: Path) -> None:
    """The stage is left while micro-batches are in flight, some of a round and some redispatched."""
    async with open_replicas(tmp_path, [1, 1]) as stages:
        first = stages[0][0]
        async with first.serving(RULES, {}):
            for round_ends_first in (False, True):
                waits = trio.Event()

                def on_event(event: Event, waits: trio.Event = waits) -> None:
                    if event.name == "pipeline_waiting":
                        waits.set()

                source = MicroBatchSource(first.server, read_tokens)
                with first.log.subscribed(on_event):
                    async with trio.open_nursery() as round_:
                        async with source.open():
                            round_.start_soon(source.dispatch, [(0, 8)])
                            await waits.wait()  # the next stage has no replica
                            source.redispatch([(20, 24)])
                            while source.totals.dispatched < WINDOW_MIN + 2:
                                await trio.sleep(0.01)
                            if round_ends_first:
                                round_.cancel_scope.cancel()
                        round_.cancel_scope.cancel()
                told = first.seen("pipeline_progress")[-1].fields
                assert told["dispatched"] == told["abandoned"] == WINDOW_MIN + 2 and told["completed"] == 0
