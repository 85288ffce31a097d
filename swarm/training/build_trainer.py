"""Building a replica's trainer: a worker with the whole model or, in a pipeline, a worker and a server for a stage."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from statistics import median_low
from typing import Final

import trio
from torch import Tensor

from optim.config import AllReduceConfig
from peer.ipc.span import spans_of
from peer.ipc.stage_spec import StageSpec
from peer.ipc.train_messages import LoadBase
from peer.worker.client import open_worker_group
from peer.worker.stage_client import open_stage_worker_group
from swarm.membership.member_record import MemberRecord, MemberView
from swarm.membership.proven_heads import ask_proven_heads
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.config import STALENESS, LoadReport, PipelineSettings
from swarm.pipeline.data_feed import RemoteTokens
from swarm.pipeline.local_steps import LocalSteps
from swarm.pipeline.recovery.lost_samples import LostSamples
from swarm.pipeline.recovery.redispatch import Redispatcher
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageServer
from swarm.pipeline.stage_trainer import HeldOut, StageTrainer
from swarm.pipeline.synchronous import BatchTracker, Synchronous
from swarm.placement.stage_choice import at_work, replicas_of
from swarm.protocol.receipts import PROOF_MAX, StageProof
from swarm.rounds.trainers.overlapped_trainer import trainer_of
from swarm.rounds.trainers.upkeep import ReplicaTrainer
from swarm.run.agreement import agreement_config, schedule_of
from swarm.run.manifest import Manifest
from swarm.run.peer_context import PeerContext
from swarm.training.checkpoints import LocalCheckpoint
from swarm.training.corpus import CorpusReader, open_corpus
from swarm.training.worker_config import worker_config

PROVE_S: Final = 1.5
PROVERS_MAX: Final = 4  # peers that are asked for a head


@asynccontextmanager
async def build_trainer(
    context: PeerContext, stage: int, checkpoint: LocalCheckpoint, known: MemberView, base: LoadBase | None
) -> AsyncIterator[tuple[ReplicaTrainer, StageServer | None]]:
    """Start the worker; it ends with the block. `base`: the weights that an adapter is beside.

    Yields the replica's trainer, a `WorkerTrainer` where it trains the whole model; in a pipeline also the server that
    its micro-batches come through. Raises ConfigError, ResourceError, WorkerError."""
    manifest, events = context.manifest, context.host.events
    if manifest.stages > 1:
        async with _build_stage_trainer(context, stage, checkpoint, known, base) as built:
            yield built
        return
    async with open_worker_group(worker_config(context, base=base)) as worker_group:
        trainer = trainer_of(worker_group, manifest.outer, checkpoint.state.strategy, events, context.samples)
        yield trainer, None


@asynccontextmanager
async def _build_stage_trainer(
    context: PeerContext, stage: int, checkpoint: LocalCheckpoint, known: MemberView, base: LoadBase | None
) -> AsyncIterator[tuple[ReplicaTrainer, StageServer]]:
    host = context.host
    settings, schedule = settings_of(context.manifest), schedule_of(context.manifest, stage)

    def replicas(of: int) -> dict[str, LoadReport]:
        return replicas_of(of, known(), time.time(), host.connected)

    corpus = await open_corpus(context) if stage == 0 else None
    async with open_stage_worker_group(worker_config(context, spec_of(context.manifest, stage), base)) as worker_group:
        samples = settings.round_samples if settings.synchronous else None
        accounting = SampleAccounting(checkpoint.head, settings.micro_batch, samples, host.peer_id)
        prove = partial(_prove_head, context, known)
        server = StageServer(stage, settings, worker_group, host, accounting, replicas, prove)
        source, held_out = None, None
        if corpus is not None:
            source = MicroBatchSource(server, RemoteTokens(host, settings, lambda: feeders(known()), corpus.read))
            held_out = _held_out(corpus, settings.micro_batch)

        def committed() -> int | None:
            return first_round(known(), time.time())

        redispatcher = Redispatcher(server, lambda: list(replicas(0)), source)
        trainer: StageTrainer
        if settings.synchronous:
            tracker = BatchTracker(server, schedule, redispatcher)
            trainer = Synchronous(server, schedule, tracker, source, held_out)
        else:
            lost = None
            if stage:
                lost = LostSamples(server, redispatcher, lambda: replicas(stage), schedule.rounds)
            trainer = LocalSteps(server, schedule, source, held_out, committed, lost)
        async with server.open(trainer):
            yield trainer, server


async def _prove_head(context: PeerContext, known: MemberView, stage: int) -> StageProof:
    """Return the proof of the newest head of a stage that its replicas and the coordinator report."""
    manifest, host = context.manifest, context.host
    config = agreement_config(manifest, stage, host.peer_id)
    peers = [manifest.authority, *sorted(at_work(stage, known(), time.time()))]
    found = await ask_proven_heads(host, config, peers, PROVE_S, PROVERS_MAX)
    return next((proven.links for proven in found if len(proven.links) <= PROOF_MAX), ())


def settings_of(manifest: Manifest) -> PipelineSettings:
    """Return what the manifest of a pipeline fixes about its micro-batches."""
    outer = manifest.outer
    return PipelineSettings(
        run_id=manifest.run_id,
        groups=manifest.groups,
        micro_batch=manifest.micro_batch,
        seq_len=manifest.data.seq_len,
        hidden_size=manifest.model.hidden_size,
        vocab_size=manifest.model.vocab_size,
        marked=manifest.data.has_marks,
        activations=manifest.pipeline.activations,
        synchronous=manifest.synchronous,
        round_samples=outer.batch if isinstance(outer, AllReduceConfig) else 0,
    )


def spec_of(manifest: Manifest, stage: int) -> StageSpec:
    """Return the first message to the worker of a stage."""
    synchronous = manifest.synchronous
    return StageSpec(
        span=spans_of(manifest.cuts)[stage],
        index=stage,
        max_tokens=manifest.micro_batch * manifest.data.seq_len,
        recompute=manifest.pipeline.recompute,
        staleness=0 if synchronous else STALENESS,
        previous=synchronous,
        marked=manifest.data.has_marks,
    )


def feeders(records: Mapping[str, MemberRecord]) -> list[str]:
    """Return the peers that read text for others."""
    return [peer for peer, record in records.items() if record.role == "feeder"]


def _held_out(corpus: CorpusReader, micro_batch: int) -> HeldOut:
    async def batches() -> Sequence[Tensor]:
        return await trio.to_thread.run_sync(corpus.held_out, micro_batch)

    return HeldOut(batches, corpus.corpus.bytes_per_token, corpus.samples)


def first_round(records: Mapping[str, MemberRecord], now_s: float) -> int | None:
    """Return the latest round that most replicas at work in the first stage report as committed; None where most have
    no state yet, or there is none."""
    rounds = [record.round for record in at_work(0, records, now_s).values()]
    latest = median_low(rounds) if rounds else -1
    return latest if latest >= 0 else None
