"""Neighbours in a pipeline that answer, request or ask nonsense are refused, and penalized where it is their fault."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio

from peer.errors import ConnectionLost, RemoteError
from peer.net.host import Host
from peer.net.method import Call, Empty, Method
from swarm.pipeline import sender
from swarm.pipeline.activations import ActivationCode
from swarm.pipeline.config import PipelineSettings
from swarm.pipeline.data_feed import serve_tokens
from swarm.pipeline.messages import (
    COUNTED,
    FEED_SAMPLES_MAX,
    IS_COUNTED,
    REASON_MAX,
    REDISPATCH,
    RETRIED_MAX,
    SAMPLE_RANGES_MAX,
    AskCounted,
    AskTokens,
    ForwardReply,
    IsCountedQuery,
    IsCountedReply,
    Redispatch,
    forward_method,
    tokens_method,
)
from swarm.protocol.ledger import Ledger, Range
from tests.peer.support.stage_harness import MODEL
from tests.peer.support.stage_worker_harness import is_idle
from tests.swarm.support.pipeline_harness import (
    HIDDEN_BYTES,
    MICRO,
    SEQ,
    Replica,
    Table,
    dispatch_all,
    head_at,
    open_impostor,
    open_replicas,
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
VALUES = MICRO * SEQ * MODEL.hidden_size
GRADIENT = bytes(ActivationCode("int8").size_bytes(VALUES))
NAN, INF = math.nan, math.inf
BATCH = 4 * MICRO


class Lie(msgspec.Struct):
    """A `ForwardReply` that is not checked when it is made."""

    outcome: Any = "done"
    cause: Any = ""
    reason: Any = ""
    retry_after_s: Any = 0.0
    begun: Any = False
    loss: Any = 1.0
    queued_s: Any = 0.0
    downstream_s: Any = 0.0
    waited_s: Any = 0.0
    retried: Any = 0


def scale(value: float) -> bytes:
    """A gradient whose first block has that scale."""
    return torch.tensor([value]).numpy().tobytes() + GRADIENT[4:]


LIES = {
    "loss nan": (Lie(loss=NAN), GRADIENT),
    "loss inf": (Lie(loss=INF), GRADIENT),
    "loss huge": (Lie(loss=-1e300), GRADIENT),
    "loss text": (Lie(loss="low"), GRADIENT),
    "waited -inf": (Lie(waited_s=-INF), GRADIENT),
    "queued nan": (Lie(queued_s=NAN), GRADIENT),
    "downstream < 0": (Lie(downstream_s=-1.0), GRADIENT),
    "downstream huge": (Lie(downstream_s=1e300), GRADIENT),
    "busy without end": (Lie("busy", retry_after_s=INF), b""),
    "retried < 0": (Lie(retried=-1), GRADIENT),
    "retried huge": (Lie(retried=1 << 40), GRADIENT),
    "an outcome of its own": (Lie("perhaps"), GRADIENT),
    "a long reason": (Lie("refused", reason="x" * (REASON_MAX + 1)), b""),
    "no gradient": (Lie(), b""),
    "one byte more": (Lie(), GRADIENT + b"\0"),
    "scale nan": (Lie(), scale(NAN)),
    "scale inf": (Lie(), scale(INF)),
    "scale huge": (Lie(), scale(3e38)),
    "scale < 0": (Lie(), scale(-1.0)),
}


def answers(host: Host, rules: PipelineSettings, stage: int, table: Table, body: Any, payload: bytes) -> None:
    """Let `host` answer every FORWARD with these."""

    async def on_pass(call: object) -> tuple[Any, bytes]:
        return body, payload

    limits = forward_method(rules)
    host.rpc.register(
        Method(
            limits.name,
            limits.request,
            type(body),
            request_payload_max=limits.request_payload_max,
            reply_payload_max=len(payload),
        ),
        on_pass,
    )
    table[host.peer_id] = {"stage": stage, "addresses": list(host.addresses)}


async def test_impossible_answer_costs_a_retry_and_a_penalty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One liar after another, beside an honest replica; a new replica is tried at once."""
    without_haste(monkeypatch)
    rules = rules_of(2, activations="int8")
    async with open_replicas(tmp_path, [1, 1]) as stages:
        first, last = stages[0][0], stages[1][0]
        for k, (name, (body, payload)) in enumerate(LIES.items()):
            del first.events[:]
            async with serving(stages, rules) as table, open_impostor(rules, 1, {}, None) as liar:
                answers(liar, rules, 1, table, body, payload)
                loss = await dispatch_all(first, spans(2 * k, 2))
                assert set(first.struck()) == {liar.peer_id}, name
                assert 0 < loss / (2 * rules.tokens) < 20
        for replica in (first, last):
            assert len((await replica.worker_group.take_gradient()).micro_batches) == 2 * len(LIES)
            assert is_idle(replica.worker_group)
        assert not last.struck()


async def test_unusable_gradient_costs_at_most_the_micro_batch(
    tmp_path: Path,
) -> None:
    """It is finite but far too large. The whole stage answers so at first, then one of two replicas."""
    rules = rules_of(2)
    absurd = torch.full((VALUES,), 1e25).numpy().tobytes()
    async with open_replicas(tmp_path, [1, 1]) as stages:
        first, last = stages[0][0], stages[1][0]
        with trio.fail_after(300):
            async with serving([[first]], rules) as table, open_impostor(rules, 1, {}, None) as liar:
                answers(liar, rules, 1, table, Lie(), absurd)
                (span,) = spans(0, 1)
                result = await first.source.dispatch_one(span, tokens_of(span))
                assert (result.done, result.cause) == (False, "not_finite")
        async with serving(stages, rules) as table, open_impostor(rules, 1, {}, None) as liar:
            answers(liar, rules, 1, table, Lie(), absurd)
            assert 0 < await dispatch_all(first, spans(1, 4)) / (4 * rules.tokens) < 20
        for replica in (first, last):
            assert len((await replica.worker_group.take_gradient()).micro_batches) == 4
            assert is_idle(replica.worker_group)


async def test_false_holder_is_ignored_in_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender, "FOLLOW_S", 0.3)
    rules = rules_of(2)
    async with (
        open_replicas(tmp_path, [1, 1]) as stages,
        serving(stages, rules) as table,
        open_impostor(rules, 1, {}, None) as liar,
    ):
        first, last = stages[0][0], stages[1][0]

        async def on_seen(call: Call[IsCountedQuery]) -> IsCountedReply:
            return IsCountedReply(tuple(True for _ in call.body.ranges))

        liar.rpc.register(IS_COUNTED, on_seen)
        answers(liar, rules, 1, table, ForwardReply("busy", "full", begun=True), b"")
        with trio.fail_after(300):
            await dispatch_all(first, spans(0, 8))
        assert len((await last.worker_group.take_gradient()).micro_batches) == 8


async def test_forwarded_exaggeration_is_not_penalized(tmp_path: Path) -> None:
    """The last stage exaggerates as much as it may. The stage between believes no more than its clock allows."""
    rules = rules_of(3)
    async with (
        open_replicas(tmp_path, [1, 1, 0]) as stages,
        serving(stages, rules) as table,
        open_impostor(rules, 2, {}, None) as last,
    ):
        scenario = ForwardReply("done", loss=1e11, queued_s=1e9, downstream_s=1e9, waited_s=1e9, retried=RETRIED_MAX)
        answers(last, rules, 2, table, scenario, bytes(HIDDEN_BYTES))
        began = trio.current_time()
        result = await stages[0][0].source.dispatch_one((0, MICRO), tokens_of((0, MICRO)))
        assert result.done and result.counted and 0 <= result.waited_s <= trio.current_time() - began
        assert not stages[0][0].struck() and not stages[1][0].struck()


async def refused(host: Host, replica: Replica, method: Method[Any, Any], body: Any, words: str | None = None) -> None:
    """Check that the call is refused, with `words` if given, and that its sender is penalized."""
    del replica.events[:]
    with pytest.raises((ConnectionLost, RemoteError), match=words):
        await host.rpc.call(replica.peer, method, body, timeout_s=60)
    assert replica.struck() == [host.peer_id], body
    assert not replica.seen("bug")


async def test_nonsensical_requests_are_refused(tmp_path: Path) -> None:
    rules = rules_of(2, synchronous=True, round_samples=BATCH)
    group, other = rules.groups
    far = 1 << 52
    async with (
        open_replicas(tmp_path, [1, 1]) as stages,
        serving(stages, rules) as table,
        open_impostor(rules, 1, table, None) as stranger,
    ):
        first = stages[0][0]
        stranger.book.add(first.peer, first.host.addresses)

        source = first.source
        async with source.open():
            spans: tuple[Range, ...]
            for spans in (((1, 1 + MICRO),), ((MICRO, 0),), ((0, 0),), ((0, 1),), ((0, far),), ((0, far), (far, 0))):
                await refused(stranger, first, REDISPATCH, Redispatch(group, 0, spans), "ProtocolViolation|samples")
            for spans in (((-MICRO, 0),), ((0, 1 << 60),), ((0, MICRO),) * (SAMPLE_RANGES_MAX + 1)):
                for method, body in (
                    (REDISPATCH, Redispatch(group, 0, spans)),
                    (IS_COUNTED, IsCountedQuery(group, spans)),
                ):
                    await refused(stranger, first, method, body)
            for epoch in (-1, 1 << 60):
                await refused(stranger, first, REDISPATCH, Redispatch(group, epoch, ()))
                await refused(stranger, first, COUNTED, AskCounted(group, epoch))
            await refused(stranger, first, IS_COUNTED, IsCountedQuery("x" * 65, ()))

            # A request about another group or batch is no violation, and does nothing.
            del first.events[:]
            elsewhere = ((0, MICRO),)
            for body in (
                Redispatch(other, 0, elsewhere),
                Redispatch(group, 7, elsewhere),
                Redispatch(group, 0, ()),
                Redispatch(group, 0, ((BATCH, BATCH + MICRO),)),  # of a batch to come
                Redispatch(group, 0, ((0, BATCH + MICRO),)),
            ):
                await stranger.rpc.call(first.peer, REDISPATCH, body, timeout_s=60)
            first.server.moved(head_at(rules, 0, 3, Ledger(cursor=3 * BATCH)))
            for epoch, span in ((3, (2 * BATCH, 3 * BATCH)), (2, (3 * BATCH, 4 * BATCH)), (1, (BATCH, 2 * BATCH))):
                await stranger.rpc.call(first.peer, REDISPATCH, Redispatch(group, epoch, (span,)), timeout_s=60)
            seen = await stranger.rpc.call(first.peer, IS_COUNTED, IsCountedQuery(other, elsewhere), timeout_s=60)
            assert seen.body.counted == (False,)
            assert not source.dispatching and source.totals.dispatched == 0 and not first.struck()

            # Samples of the batch of the epoch, this one or the one before, are dispatched.
            batches = ((3, (4 * BATCH - MICRO, 4 * BATCH)), (2, (2 * BATCH, 2 * BATCH + MICRO)))
            for epoch, span in batches:
                await stranger.rpc.call(first.peer, REDISPATCH, Redispatch(group, epoch, (span,)), timeout_s=60)
            assert source.dispatching == tuple(sorted(span for _, span in batches))


async def test_with_local_steps_only_what_is_merged_is_dispatched_again(tmp_path: Path) -> None:
    """A redispatched sample that is free would belong to no assignment, and the whole round's work would be void."""
    rules = rules_of(2)
    async with (
        open_replicas(tmp_path, [1, 0]) as stages,
        serving(stages, rules) as table,
        open_impostor(rules, 1, table, None) as later,
    ):
        first = stages[0][0]
        later.book.add(first.peer, first.host.addresses)
        free = ((2 * MICRO, 3 * MICRO),)
        first.server.moved(head_at(rules, 0, 3, Ledger(4 * MICRO, free)))
        for spans in (free, ((4 * MICRO, 9 * MICRO),), ()):
            await later.rpc.call(first.peer, REDISPATCH, Redispatch(rules.groups[0], 0, spans), timeout_s=60)
        assert not first.listener.redispatched
        asked = Redispatch(rules.groups[0], 0, ((MICRO, 9 * MICRO),))
        await later.rpc.call(first.peer, REDISPATCH, asked, timeout_s=60)
        assert first.listener.redispatched == [((MICRO, 2 * MICRO), (3 * MICRO, 4 * MICRO))]
        assert not first.struck()


async def test_feeder_refuses_too_many_samples(tmp_path: Path) -> None:
    """Ranges that end before they begin make up for others that are far too long."""
    rules = rules_of(2)
    read: list[Sequence[Range]] = []

    async def local(spans: Sequence[Range]) -> torch.Tensor:
        read.append(spans)
        return torch.cat([tokens_of(span) for span in spans])

    async with open_impostor(rules, 0, {}, None) as asker, open_impostor(rules, 0, {}, None) as feeder:
        asker.book.add(feeder.peer_id, feeder.addresses)
        serve_tokens(feeder.rpc, rules, local)
        method: Method[AskTokens, Empty] = tokens_method(rules)
        far = 1 << 52
        for spans in (((0, far), (far, FEED_SAMPLES_MAX)), ((4, 2), (0, 4)), ((0, 0), (0, 2))):
            with pytest.raises(RemoteError, match="samples at once"):
                await asker.rpc.call(feeder.peer_id, method, AskTokens(rules.run_id, spans), timeout_s=60)
        assert not read
