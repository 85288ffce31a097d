"""What trains at a seat: a worker with the whole model or, in a pipeline, one with a stage and its station."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import median_low
from typing import Final, Protocol

import trio
from torch import Tensor

from optim.config import AllReduce
from peer.ipc.stage_spec import StageSpec
from peer.worker.client import open_worker_group
from peer.worker.stage_client import open_stage_worker_group
from swarm.membership.membership import Known, MemberRecord
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.config import STALENESS, Load, PipelineRules
from swarm.pipeline.data_feed import FedTokens
from swarm.pipeline.local_steps import LocalSteps
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageServer
from swarm.pipeline.stage_trainer import HeldOut, StageTrainer, StageTrainerContext
from swarm.pipeline.synchronous import BatchTracker, Synchronous
from swarm.placement.stage_choice import at_work, replicas_of
from swarm.protocol.round_schedule import Pace
from swarm.rounds.overlapped_trainer import trainer_of
from swarm.rounds.trainer import Trainer
from swarm.run.manifest import Manifest
from swarm.training.checkpoints import LocalCheckpoint
from swarm.training.context import PeerContext
from swarm.training.corpus import CorpusReader, open_texts

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


def pace_of(manifest: Manifest, stage: int) -> Pace:
    """How much work the rounds of a stage's group have."""
    inner, seq_len = manifest.inner, manifest.data.seq_len
    return Pace(manifest.outer, inner, seq_len, COMPUTE_S_MAX, stage, manifest.stages, manifest.micro_batch)


@asynccontextmanager
async def fitted(ground: PeerContext, stage: int, kept: LocalCheckpoint, known: Known) -> AsyncIterator[Fitting]:
    """Start the worker. Raises ConfigError, ResourceError, WorkerError."""
    manifest, events = ground.manifest, ground.host.events
    if manifest.stages > 1:
        async with _fitted_with_stage(ground, stage, kept, known) as fitting:
            yield fitting
        return
    async with open_worker_group(ground.gang()) as gang:
        yield trainer_of(gang, manifest.outer, kept.state.recipe, events), None


@asynccontextmanager
async def _fitted_with_stage(
    ground: PeerContext, stage: int, kept: LocalCheckpoint, known: Known
) -> AsyncIterator[Fitting]:
    host, events = ground.host, ground.host.events
    rules, pace = rules_of(ground.manifest), pace_of(ground.manifest, stage)

    def replicas(of: int) -> dict[str, Load]:
        return replicas_of(of, known(), time.time())

    texts = await open_texts(ground) if stage == 0 else None
    async with open_stage_worker_group(ground.gang(spec_of(ground.manifest, stage))) as gang:
        samples = rules.round_samples if rules.synchronous else None
        counting = SampleAccounting(kept.head, rules.micro_batch, samples, host.peer_id)
        station = StageServer(stage, rules, gang, host, counting, replicas, events)
        issuer, held_out = None, None
        if texts is not None:
            issuer = MicroBatchSource(station, FedTokens(host, rules, lambda: feeders(known()), texts.read), events)
            held_out = _held_out(texts, rules.micro_batch)

        def committed() -> int | None:
            return first_round(known(), time.time())

        rounds = ground.manifest.run.rounds
        post = StageTrainerContext(gang, station, pace, events, issuer, held_out, committed, rounds)
        trainer: StageTrainer
        if rules.synchronous:
            issue_here = None if issuer is None else issuer.reissue
            trainer = Synchronous(post, BatchTracker(host, rules, pace, lambda: list(replicas(0)), issue_here, events))
        else:
            trainer = LocalSteps(post)
        async with station.open():
            yield trainer, station


def rules_of(manifest: Manifest) -> PipelineRules:
    """What the manifest of a pipeline fixes about its micro-batches."""
    outer = manifest.outer
    return PipelineRules(
        run_id=manifest.run_id,
        groups=manifest.groups,
        micro_batch=manifest.micro_batch,
        seq_len=manifest.data.seq_len,
        hidden_size=manifest.model.hidden_size,
        vocab_size=manifest.model.vocab_size,
        activations=manifest.pipeline.activations,
        synchronous=manifest.synchronous,
        round_samples=outer.batch if isinstance(outer, AllReduce) else 0,
    )


def spec_of(manifest: Manifest, stage: int) -> StageSpec:
    """What the worker of a stage is told."""
    synchronous = manifest.synchronous
    return StageSpec(
        stages=manifest.cuts,
        index=stage,
        max_tokens=manifest.micro_batch * manifest.data.seq_len,
        recompute=manifest.pipeline.recompute,
        staleness=0 if synchronous else STALENESS,
        previous=synchronous,
    )


def feeders(records: Mapping[str, MemberRecord]) -> list[str]:
    """Who reads text for others."""
    return [peer for peer, record in records.items() if record.role == "feeder"]


def _held_out(texts: CorpusReader, micro_batch: int) -> HeldOut:
    async def batches() -> Sequence[Tensor]:
        return await trio.to_thread.run_sync(texts.held_out, micro_batch)

    return HeldOut(batches, texts.corpus.bytes_per_token)


def first_round(records: Mapping[str, MemberRecord], now_s: float) -> int | None:
    """The latest round that most replicas at work in the first stage say they have committed; None where most have no
    state yet, or nobody is there."""
    rounds = [record.round for record in at_work(0, records, now_s).values()]
    latest = median_low(rounds) if rounds else -1
    return latest if latest >= 0 else None
