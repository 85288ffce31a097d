"""What trains at a seat: a worker with the whole model or, in a pipeline, one with a stage and its station."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import median_low
from typing import Final, Protocol

import trio
from torch import Tensor

from optim.config import AllReduceConfig
from peer.ipc.span import spans_of
from peer.ipc.stage_spec import StageSpec
from peer.worker.client import open_worker_group
from peer.worker.stage_client import open_stage_worker_group
from swarm.membership.membership import MemberRecord, MemberView
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.config import STALENESS, LoadReport, PipelineSettings
from swarm.pipeline.data_feed import RemoteTokens
from swarm.pipeline.local_steps import LocalSteps
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageServer
from swarm.pipeline.stage_trainer import HeldOut, StageTrainer
from swarm.pipeline.synchronous import BatchTracker, Synchronous
from swarm.placement.stage_choice import at_work, replicas_of
from swarm.protocol.round_schedule import RoundSchedule
from swarm.rounds.overlapped_trainer import trainer_of
from swarm.rounds.trainer import Trainer
from swarm.run.manifest import Manifest
from swarm.training.checkpoints import LocalCheckpoint
from swarm.training.context import PeerContext
from swarm.training.corpus import CorpusReader, open_corpus

COMPUTE_S_MAX: Final = 3600.0


class ReplicaTrainer(Trainer, Protocol):
    """A trainer that lives at a seat: `run` for as long as that. Losses in nats a token or (held out) a byte; where
    `validate_round` is set it measures the held-out loss when it suits, or at once when told to `validate`."""

    loss: float | None
    val_loss: float | None
    validate_round: int | None

    async def run(self) -> None: ...

    async def validate(self) -> None: ...


Fitting = tuple[ReplicaTrainer, StageServer | None]
"""What trains, and in a pipeline the station that it works with."""


def schedule_of(manifest: Manifest, stage: int) -> RoundSchedule:
    """How much work the rounds of a stage's group have."""
    inner, seq_len = manifest.inner, manifest.data.seq_len
    return RoundSchedule(manifest.outer, inner, seq_len, COMPUTE_S_MAX, stage, manifest.stages, manifest.micro_batch)


@asynccontextmanager
async def fitted(context: PeerContext, stage: int, kept: LocalCheckpoint, known: MemberView) -> AsyncIterator[Fitting]:
    """Start the worker. Raises ConfigError, ResourceError, WorkerError."""
    manifest, events = context.manifest, context.host.events
    if manifest.stages > 1:
        async with _fitted_with_stage(context, stage, kept, known) as fitting:
            yield fitting
        return
    async with open_worker_group(context.worker_group()) as worker_group:
        yield trainer_of(worker_group, manifest.outer, kept.state.strategy, events), None


@asynccontextmanager
async def _fitted_with_stage(
    context: PeerContext, stage: int, kept: LocalCheckpoint, known: MemberView
) -> AsyncIterator[Fitting]:
    host = context.host
    rules, schedule = rules_of(context.manifest), schedule_of(context.manifest, stage)

    def replicas(of: int) -> dict[str, LoadReport]:
        return replicas_of(of, known(), time.time())

    corpus = await open_corpus(context) if stage == 0 else None
    async with open_stage_worker_group(context.worker_group(spec_of(context.manifest, stage))) as worker_group:
        samples = rules.round_samples if rules.synchronous else None
        accounting = SampleAccounting(kept.head, rules.micro_batch, samples, host.peer_id)
        server = StageServer(stage, rules, worker_group, host, accounting, replicas)
        source, held_out = None, None
        if corpus is not None:
            source = MicroBatchSource(server, RemoteTokens(host, rules, lambda: feeders(known()), corpus.read))
            held_out = _held_out(corpus, rules.micro_batch)

        def committed() -> int | None:
            return first_round(known(), time.time())

        trainer: StageTrainer
        if rules.synchronous:
            tracker = BatchTracker(server, schedule, lambda: list(replicas(0)), source)
            trainer = Synchronous(server, schedule, tracker, source, held_out)
        else:
            trainer = LocalSteps(server, schedule, source, held_out, committed, context.manifest.run.rounds)
        async with server.open(trainer):
            yield trainer, server


def rules_of(manifest: Manifest) -> PipelineSettings:
    """What the manifest of a pipeline fixes about its micro-batches."""
    outer = manifest.outer
    return PipelineSettings(
        run_id=manifest.run_id,
        groups=manifest.groups,
        micro_batch=manifest.micro_batch,
        seq_len=manifest.data.seq_len,
        hidden_size=manifest.model.hidden_size,
        vocab_size=manifest.model.vocab_size,
        activations=manifest.pipeline.activations,
        synchronous=manifest.synchronous,
        round_samples=outer.batch if isinstance(outer, AllReduceConfig) else 0,
    )


def spec_of(manifest: Manifest, stage: int) -> StageSpec:
    """What the worker of a stage is told."""
    synchronous = manifest.synchronous
    return StageSpec(
        span=spans_of(manifest.cuts)[stage],
        index=stage,
        max_tokens=manifest.micro_batch * manifest.data.seq_len,
        recompute=manifest.pipeline.recompute,
        staleness=0 if synchronous else STALENESS,
        previous=synchronous,
    )


def feeders(records: Mapping[str, MemberRecord]) -> list[str]:
    """Who reads text for others."""
    return [peer for peer, record in records.items() if record.role == "feeder"]


def _held_out(corpus: CorpusReader, micro_batch: int) -> HeldOut:
    async def batches() -> Sequence[Tensor]:
        return await trio.to_thread.run_sync(corpus.held_out, micro_batch)

    return HeldOut(batches, corpus.corpus.bytes_per_token)


def first_round(records: Mapping[str, MemberRecord], now_s: float) -> int | None:
    """The latest round that most replicas at work in the first stage say they have committed; None where most have no
    state yet, or nobody is there."""
    rounds = [record.round for record in at_work(0, records, now_s).values()]
    latest = median_low(rounds) if rounds else -1
    return latest if latest >= 0 else None
