"""Replicas of a small model's stages with their engines, over real sockets and with real workers. A static table of
replicas stands in for the DHT, and a throwaway key for the authority."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio
from swarm.rounds.engine import Engine
from swarm.rounds.handlers import RunLimits
from swarm.rounds.replay import replay

from optim.config import AllReduceConfig, CodecConfig, OuterConfig
from optim.strategies.registry import build_strategy
from peer.config import InnerConfig
from peer.identity import Identity, sign_body
from peer.model.layout import init_flat, split_flat
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.config import LoadReport, PipelineSettings
from swarm.pipeline.local_steps import LocalSteps
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageServer
from swarm.pipeline.stage_trainer import StageTrainer
from swarm.pipeline.synchronous import BatchTracker, Synchronous
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.ledger import Range
from swarm.protocol.messages import REGROUP_KIND
from swarm.protocol.quorum import HeadCandidate
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.state.fetch import fetch_state
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore
from tests.peer.support.stage_harness import INNER, MODEL, SPLITS
from tests.swarm.support.pipeline_harness import MICRO, SEQ, Replica, Table, replicas_in, rules_of, tokens_of

FP32 = CodecConfig(up="fp32", down="fp32")
# Unclipped, for a stage does not know the whole gradient's norm; eps so large that AdamW does not divide rounding
# errors by themselves, and a rate at which they do not grow: one process in fp32 is then at most 5e-6 (gradients) and
# 2e-7 (weights) from the same in float64 in twenty steps (lr 3e-3: 4e-5 and 8e-7; eps 1e-8: 3e-2 in the weights).
UNCLIPPED = msgspec.structs.replace(INNER, lr=5e-4, clip_norm=1e9, eps=1e-3)


@dataclass(frozen=True)
class Setting:
    """A run. `members[s]`: those of stage s in its first round."""

    stages: int
    outer: OuterConfig
    rounds: int
    codec: CodecConfig = FP32
    inner: InnerConfig = UNCLIPPED

    @property
    def rules(self) -> PipelineSettings:
        batch = self.outer.batch if isinstance(self.outer, AllReduceConfig) else 0
        return rules_of(self.stages, synchronous=batch > 0, round_samples=batch)

    @property
    def spec(self) -> dict[str, Any]:
        """Of the workers."""
        synchronous = self.rules.synchronous
        return {"staleness": 0 if synchronous else 1, "previous": synchronous}


@dataclass
class StageMember:
    """One replica that takes part in its group's rounds. Implements the engine's `CommitListener`."""

    replica: Replica
    context: RoundContext
    trainer: StageTrainer
    snapshots: SnapshotStore
    others: Callable[[], Iterable[str]]
    folder: Path
    entry: dict[str, Any]  # in the table: its round, as records say it
    heads: list[Head] = field(default_factory=list)
    merged: list[tuple[tuple[Range, ...], ...]] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # synchronous: what each round has merged
    engine: Engine = field(init=False)

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        state = self.context.state
        assert state.tree.root == head.state_hash
        self.merged.append(self.engine.counted if results else ())
        if results and self.context.schedule.synchronous:
            self._note_gradient(head, results)
        self.entry["round"] = head.round
        same = bool(self.heads) and self.heads[-1].state_hash == head.state_hash
        self.heads.append(head)
        self.snapshots.publish(state.tree, state.tensors, msgspec.msgpack.encode(head), results)
        changed = () if same else state.changed if results else None
        self.trainer.adopt(state.theta, changed, head)

    async def fetch(self, candidate: HeadCandidate, mine: Head) -> None:
        donors = list(candidate.holders)
        if not await replay(self.context, mine, candidate.head.state_hash, donors):
            fetched = await fetch_state(
                self.replica.host.rpc,
                lambda: donors,
                candidate.head.state_hash,
                self.context.state.size_bytes,
                self.folder / "state.part",
                self.context.events,
            )
            self.context.state.replace(fetched.tensors, fetched.tree)

    def known_peers(self) -> Iterable[str]:
        return self.others()

    def _note_gradient(self, head: Head, results: list[memoryview]) -> None:
        """Note the merged gradient as every member has decoded it; a dense method's coding is the same in every
        round."""
        state = self.context.state
        coding = state.strategy.coding(self.context.schedule.round_info(head), state.tensors)
        merged = self.gradients[head.round] = torch.empty_like(state.theta)
        for index, result in enumerate(results):
            for place, values in coding.updates(index, result):
                merged[place] = values


def _first_round(table: Table) -> int | None:
    return max((entry.get("round", 0) for entry in table.values() if entry["stage"] == 0), default=None)


def entry_of(replica: Replica) -> dict[str, Any]:
    """Return the replica's entry of the table."""
    return {"stage": replica.stage, "addresses": list(replica.host.addresses), "session": secrets.token_hex(4)}


@asynccontextmanager
async def open_member(
    replica: Replica, setting: Setting, table: Table, authority: Identity, folder: Path
) -> AsyncIterator[StageMember]:
    """Open a member whose engine is ready to run. `table` has all replicas by peer id."""
    stage, rules, host = replica.stage, setting.rules, replica.host
    theta = split_flat(MODEL, init_flat(MODEL, seed=0), SPLITS[setting.stages])[stage]
    strategy = build_strategy(setting.outer, setting.codec, replica.worker_group.layout, setting.inner)
    state = OuterState([theta.clone(), *(torch.zeros_like(theta) for _ in strategy.shared)], strategy)
    first = genesis(rules.groups[stage], state.tree.root)
    mates = {peer: entry for peer, entry in table.items() if entry["stage"] == stage}
    head = first.regrouped(tuple(Member(peer, entry["session"]) for peer, entry in mates.items()), 1)
    schedule = RoundSchedule(setting.outer, setting.inner, SEQ, 600.0, stage, setting.stages, MICRO)
    accounting = SampleAccounting(head, MICRO, rules.round_samples or None, host.peer_id)

    def replicas_of(of: int) -> dict[str, LoadReport]:
        return {p: load for p, load in replicas_in(table, of, host).items() if p not in host.suspects}

    async def tokens(spans: Sequence[Range]) -> torch.Tensor:
        return torch.cat([tokens_of(span) for span in spans])

    server = StageServer(stage, rules, replica.worker_group, host, accounting, replicas_of)
    replica.server = server
    source = None
    if stage == 0:
        source = replica.source = MicroBatchSource(server, tokens)
    trainer: StageTrainer
    if rules.synchronous:
        tracker = BatchTracker(server, schedule, lambda: list(replicas_of(0)), source)
        trainer = Synchronous(server, schedule, tracker, source)
    else:
        trainer = LocalSteps(server, schedule, source, None, lambda: _first_round(table), setting.rounds)
    snapshots = SnapshotStore(state.size_bytes, 9 << 20)
    snapshots.publish(state.tree, state.tensors)
    snapshots.serve(host.rpc)
    me = Member(host.peer_id, table[host.peer_id]["session"])
    round_context = RoundContext(me, host, state, snapshots, trainer, schedule, AdaptiveTimeouts(60.0))
    member = StageMember(replica, round_context, trainer, snapshots, lambda: list(mates), folder, table[host.peer_id])
    facts = RunLimits(first, authority.peer_id, setting.rounds, 64)
    member.engine = Engine(round_context, facts, head, sign_body(authority, REGROUP_KIND, head), member)
    for peer, entry in table.items():
        host.book.add(peer, entry["addresses"])
    host.watch(table, "pipeline")
    trainer.adopt(state.theta, None, head)
    async with server.open(trainer), trio.open_nursery() as nursery:
        nursery.start_soon(trainer.run)
        yield member
        nursery.cancel_scope.cancel()
