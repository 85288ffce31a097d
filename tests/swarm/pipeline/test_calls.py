"""Micro-batches through replicas over real sockets: the gradients are the whole model's, and no peer can spoil them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import trio

from optim.config import DilocoConfig
from peer.errors import ConnectionLost
from peer.events import Event
from peer.model.layout import init_flat, join_flat
from swarm.pipeline import stage_trainer
from swarm.pipeline.activations import ActivationCode
from swarm.pipeline.local_steps import LocalSteps
from swarm.pipeline.messages import ForwardReply, ForwardRequest
from swarm.pipeline.stage_trainer import HeldOut
from swarm.protocol.ledger import count
from swarm.protocol.round_schedule import RoundSchedule
from tests.peer.support.stage_harness import INNER, MODEL, SPLITS, relative, whole_gradient
from tests.peer.support.stage_worker_harness import is_idle
from tests.swarm.support.pipeline_harness import (
    HIDDEN_BYTES,
    MICRO,
    SEQ,
    Replica,
    Table,
    dispatch_all,
    head_at,
    ids_of,
    open_impostor,
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


async def gradient_of(stages: list[list[Replica]]) -> tuple[torch.Tensor, list[int]]:
    """Take the mean gradient of the whole model over all that the replicas of each stage counted, and the number of
    micro-batches that each stage counted."""
    sums, counted = [], []
    for replicas in stages:
        total, tokens = torch.zeros_like(replicas[0].worker_group.delta), 0
        seen: list[str] = []
        for replica in replicas:
            taken = await replica.worker_group.take_gradient()
            total += replica.worker_group.delta * taken.tokens
            tokens += taken.tokens
            seen += taken.micro_batches
        assert len(set(seen)) == len(seen), "counted twice"
        counted.append(len(seen))
        sums.append(total / tokens)
    return join_flat(MODEL, sums, SPLITS[len(stages)]), counted


async def test_gradients_equal_the_whole_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three stages with 1, 2 and 2 replicas. fp32 exactly, then coded activations: the mean error of a sum of 10."""
    without_haste(monkeypatch)
    async with open_replicas(tmp_path, [1, 2, 2]) as stages:
        for turn, (activations, bound) in enumerate((("none", 1e-5), ("fp16", 1e-3), ("int8", 0.05), ("int4", 0.6))):
            mine = spans(10 * turn, 10)
            loss, gradient = whole_gradient(MODEL, init_flat(MODEL, seed=0), [tokens_of(span) for span in mine])
            async with serving(stages, rules_of(3, activations=activations)):
                total = await dispatch_all(stages[0][0], mine)
                measured, counted = await gradient_of(stages)
                assert counted == [10, 10, 10]
                assert total / (10 * MICRO * SEQ) == pytest.approx(loss, rel=max(bound, 1e-5))
                assert relative(measured, gradient) < bound, activations
                assert all(replica.server.accounting.counted for replicas in stages for replica in replicas)
                held_out = tokens_of((7, 9))
                exact, _ = whole_gradient(MODEL, init_flat(MODEL, seed=0), [held_out])
                total, targets = await stages[0][0].source.evaluate(held_out, 60.0)
                assert total / targets == pytest.approx(exact, rel=max(bound, 1e-5))


async def test_bad_input_is_refused(tmp_path: Path) -> None:
    """A peer that sends nonsense is told so and penalized; one that is only in another epoch or group is not."""
    rules = rules_of(2, activations="int8", hold_s=0.2)
    async with open_replicas(tmp_path, [1, 1]) as stages, serving(stages, rules) as table:
        first, last = stages[0][0], stages[1][0]
        tokens = ids_of((0, MICRO))
        code = ActivationCode("int8")
        coded = torch.empty(code.size_bytes(MICRO * SEQ * MODEL.hidden_size), dtype=torch.uint8)
        await code.encode(torch.randn(MICRO, SEQ, MODEL.hidden_size), coded)
        good = tokens + coded.numpy().tobytes()
        nan = bytearray(good)
        nan[len(tokens) : len(tokens) + 4] = b"\xff\xff\xff\xff"  # the first block's scale
        async with open_impostor(rules, 0, table, None) as stranger:
            stranger.book.add(last.peer, last.host.addresses)
            violations: list[tuple[bytes, dict[str, Any], str, str]] = [
                (good[:-1], {}, "refused", "shape"),
                (b"", {}, "refused", "shape"),
                (good, {"samples": (1, 1 + MICRO)}, "refused", "shape"),
                (good, {"samples": (0, 2 * MICRO)}, "refused", "shape"),
                (good, {"batch": 1}, "refused", "shape"),
                (good, {"length": SEQ - 1}, "refused", "shape"),
                (b"\xff" * len(tokens) + good[len(tokens) :], {}, "refused", "value"),
                (bytes(nan), {}, "refused", "value"),
            ]
            for payload, changes, outcome, cause in violations:
                answer = await pass_to(stranger, rules, last.peer, 1, payload, **changes)
                assert (answer.outcome, answer.cause) == (outcome, cause), answer
            assert last.struck() == [stranger.peer_id] * len(violations)
            malformed: list[dict[str, Any]] = [
                {"epoch": -1},
                {"epoch": 1 << 60},
                {"samples": (-MICRO, 0)},
                {"samples": (1 << 60, (1 << 60) + MICRO)},
                {"samples": (0,)},
                {"batch": 0},
                {"batch": 1 << 40},
                {"length": -SEQ},
                {"ticket": -1},
                {"group": "x" * 65},
                {"again": 2},
            ]
            for changes in malformed:  # no body of ours: not even an answer
                with pytest.raises(ConnectionLost):
                    await pass_to(stranger, rules, last.peer, 1, good, **changes)
            assert last.struck() == [stranger.peer_id] * (len(violations) + len(malformed))
            with pytest.raises(ValueError, match="bytes"):
                await pass_to(stranger, rules, last.peer, 1, good + good)
            del last.events[:]
            for changes, outcome, cause in (
                ({"group": rules.groups[0]}, "elsewhere", "closing"),
                ({"epoch": 5}, "later", "early"),
            ):
                answer = await pass_to(stranger, rules, last.peer, 1, good, **changes)
                assert (answer.outcome, answer.cause) == (outcome, cause)
            assert last.server.handlers.later_epoch == 0, "it is no replica of the stage before"
            table[stranger.peer_id] = {"stage": 0, "addresses": list(stranger.addresses)}
            await pass_to(stranger, rules, last.peer, 1, good, epoch=5)
            del table[stranger.peer_id]
            assert last.server.handlers.later_epoch == 1, "it has a successor, whatever its number"
            last.server.moved(head_at(rules, 1, epoch=9))
            answer = await pass_to(stranger, rules, last.peer, 1, good, epoch=7)
            assert (answer.outcome, answer.cause) == ("refused", "stale")
            last.server.moved(head_at(rules, 1))
            assert not last.struck()

        # and nothing of it has left a trace
        mine = spans(0, 4)
        _, gradient = whole_gradient(MODEL, init_flat(MODEL, seed=0), [tokens_of(span) for span in mine])
        await dispatch_all(first, mine)
        measured, counted = await gradient_of(stages)
        assert counted == [4, 4] and relative(measured, gradient) < 0.1
        assert is_idle(last.worker_group)


async def test_garbage_gradient_costs_a_retry_and_a_penalty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two impostors answer for the last stage, one with bytes that decode to NaN, one with too few. Every micro-batch
    is counted once at the honest replica."""
    without_haste(monkeypatch)
    rules = rules_of(2)

    async def not_a_number(request: ForwardRequest, payload: memoryview) -> tuple[ForwardReply, bytes]:
        return ForwardReply("done", loss=1.0), b"\xff" * HIDDEN_BYTES

    async def too_short(request: ForwardRequest, payload: memoryview) -> tuple[ForwardReply, bytes]:
        return ForwardReply("done", loss=1.0), bytes(HIDDEN_BYTES - 4)

    async with (
        open_replicas(tmp_path, [1, 1]) as stages,
        serving(stages, rules) as table,
        open_impostor(rules, 1, table, not_a_number) as one,
        open_impostor(rules, 1, table, too_short) as two,
    ):
        first = stages[0][0]
        mine = spans(0, 12)
        await dispatch_all(first, mine)
        _, exact = whole_gradient(MODEL, init_flat(MODEL, seed=0), [tokens_of(span) for span in mine])
        measured, counted = await gradient_of(stages)
        assert counted == [12, 12] and relative(measured, exact) < 1e-5
        assert set(first.struck()) == {one.peer_id, two.peer_id}


async def test_last_evaluation_is_given_up_without_a_stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """First the last of three stages is gone, then the one before it as well. Stage 0 waits for neither."""
    rules = rules_of(3)

    async def held_out() -> list[torch.Tensor]:
        return [tokens_of((0, MICRO)), tokens_of((MICRO, 2 * MICRO))]

    async with open_replicas(tmp_path, [1, 1, 1]) as ((first,), (middle,), (last,)):
        table: Table = {}
        async with first.serving(rules, table):
            schedule = RoundSchedule(DilocoConfig(steps=1), INNER, SEQ, 600.0, 0, 3, MICRO)
            trainer = LocalSteps(first.server, schedule, first.source, HeldOut(held_out, bytes_per_token=1.0))

            async def measured() -> int:
                trainer.validate_round = 1
                with trio.fail_after(300):
                    await trainer.validate()
                return len(first.seen("val_evaluated"))

            async with middle.serving(rules, table):
                monkeypatch.setattr(stage_trainer, "LAST_EVALUATE_S", 60.0)
                async with last.serving(rules, table):
                    assert await measured() == 1 and trainer.val_round == 1
                monkeypatch.setattr(stage_trainer, "LAST_EVALUATE_S", 1.0)
                assert await measured() == 1
            assert await measured() == 1
        told = [str(event.fields["reason"]) for event in first.seen("evaluation_failed")]
        assert len(told) == 2 and "stage 1" in told[1]


async def test_downstream_retries_are_reported_on_refusal(tmp_path: Path) -> None:
    """Both replicas of the last stage refuse the micro-batch, one after the other."""
    rules = rules_of(3)

    async def refuse(request: ForwardRequest, payload: memoryview) -> tuple[ForwardReply, bytes]:
        return ForwardReply("refused", "not_finite", "what it makes of it is NaN", retried=2), b""

    async with (
        open_replicas(tmp_path, [0, 1, 0]) as (_, (middle,), _),
        serving([[middle]], rules) as table,
        open_impostor(rules, 2, table, refuse),
        open_impostor(rules, 2, table, refuse),
        open_impostor(rules, 0, {}, None) as caller,
    ):
        caller.book.add(middle.peer, middle.host.addresses)
        hidden = ids_of((0, MICRO)) + bytes(HIDDEN_BYTES)
        answer = await pass_to(caller, rules, middle.peer, 1, hidden)
        assert (answer.outcome, answer.retried) == ("refused", 1 + 2 + 2)


async def test_slow_replica_gets_little_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes one micro-batch at a time, four times as long as the other replica, and says busy to further ones."""
    without_haste(monkeypatch)
    rules = rules_of(2)
    at_once, most, served = 0, 0, 0

    def counted() -> int:
        return count(stages[1][0].server.accounting.counted) // MICRO

    async def slow(request: ForwardRequest, payload: memoryview) -> tuple[ForwardReply, bytes]:
        nonlocal at_once, most, served
        if at_once >= 1:
            return ForwardReply("busy", "full", retry_after_s=0.5), b""
        at_once, most = at_once + 1, max(most, at_once + 1)
        try:
            done = counted() + 4
            while counted() < done and counted() + served + 1 < 60:
                await trio.sleep(0.01)
        finally:
            at_once -= 1
        served += 1
        return ForwardReply("done"), bytes(HIDDEN_BYTES)

    async with (
        open_replicas(tmp_path, [1, 1]) as stages,
        serving(stages, rules) as table,
        open_impostor(rules, 1, table, slow),
    ):
        first = stages[0][0]
        await dispatch_all(first, spans(0, 60))
        assert count(first.server.accounting.counted) == 60 * MICRO
        assert most == 1 and served + counted() == 60
        assert 0 < served < 15
        assert not first.struck()


async def test_stage_without_replicas_is_waited_for(tmp_path: Path) -> None:
    rules = rules_of(2)
    async with open_replicas(tmp_path, [1, 1]) as stages:
        first, last = stages[0][0], stages[1][0]
        table: Table = {}
        async with first.serving(rules, table), trio.open_nursery() as nursery:
            waits, dispatched = trio.Event(), trio.Event()

            def on_event(event: Event) -> None:
                if event.name == "pipeline_waiting":
                    waits.set()

            async def dispatch() -> None:
                await dispatch_all(first, spans(0, 6))
                dispatched.set()

            with first.log.subscribed(on_event):
                nursery.start_soon(dispatch)
                await waits.wait()
            async with last.serving(rules, table):
                await dispatched.wait()
        assert [len(first.seen(name)) for name in ("pipeline_waiting", "pipeline_resumed")] == [1, 1]
        assert (await gradient_of(stages))[1] == [6, 6]
