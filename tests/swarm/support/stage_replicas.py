"""Replicas of a small model's stages with their groups' agreement, over real sockets and with real workers. A static
table of peers stands in for the DHT; one of its entries is the coordinator, at no stage."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio

from optim.config import AllReduceConfig, CodecConfig, OuterConfig
from optim.strategies.interface import OuterStrategy
from optim.strategies.registry import build_strategy
from peer.config import InnerConfig
from peer.events import EventLog
from peer.identity import Identity
from peer.model.layout import FlatLayout, init_flat, split_flat
from peer.net.host import HostConfig, open_host
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.config import LoadReport, PipelineSettings
from swarm.pipeline.local_steps import LocalSteps
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageServer
from swarm.pipeline.stage_trainer import StageTrainer
from swarm.pipeline.synchronous import BatchTracker, Synchronous
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.ledger import Range
from swarm.protocol.plan import Contribution
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.driver.group_driver import GroupDriver
from swarm.rounds.driver.handlers import serve_agreement
from swarm.rounds.driver.records import RecordFiles
from swarm.rounds.driver.replica_driver import ReplicaDriver, ReplicaParts
from swarm.rounds.driver.work import work_of
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore
from tests.peer.support.stage_harness import INNER, MODEL, SPLITS
from tests.swarm.support.driven_group import Weightless
from tests.swarm.support.group import begun
from tests.swarm.support.pipeline_harness import MICRO, SEQ, Replica, Table, replicas_in, rules_of, tokens_of

FP32 = CodecConfig(up="fp32", down="fp32")
# Unclipped, for a stage does not know the whole gradient's norm; eps so large that AdamW does not divide rounding
# errors by themselves, and a rate at which they do not grow: one process in fp32 is then at most 5e-6 (gradients) and
# 2e-7 (weights) from the same in float64 in twenty steps (lr 3e-3: 4e-5 and 8e-7; eps 1e-8: 3e-2 in the weights).
UNCLIPPED = msgspec.structs.replace(INNER, lr=5e-4, clip_norm=1e9, eps=1e-3)


EXCHANGE_S = 60.0
NO_STAGE = -1


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
    """One replica that takes part in its group's rounds. Implements the driver's `CommitListener`."""

    replica: Replica
    state: OuterState
    schedule: RoundSchedule
    trainer: StageTrainer
    snapshots: SnapshotStore
    mates: list[str]
    entry: dict[str, Any]  # in the table: its round, as records say it
    rounds: int
    first: Head
    """The group's first head, as it will be."""
    heads: list[Head] = field(default_factory=list)
    merged: list[tuple[tuple[Range, ...], ...]] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # synchronous: what each round has merged
    driver: ReplicaDriver = field(init=False)
    nursery: trio.Nursery = field(init=False)
    running: bool = False

    @property
    def head(self) -> Head:
        return self.heads[-1] if self.heads else self.first

    @property
    def context(self) -> RoundContext:
        assert self.driver.actor is not None
        return self.driver.actor.context

    async def run(self) -> None:
        """Take part until the last round is committed here, and serve the others until the member is closed."""
        if not self.running:
            self.running = True
            self.nursery.start_soon(self.driver.run)
        await self.driver.until_round(self.rounds)

    async def committed(self, head: Head, merged: Sequence[Contribution] | None, results: list[memoryview]) -> None:
        state = self.state
        assert state.tree.root == head.state_hash
        self.merged.append(tuple(body.counted for body in merged or ()))
        if results and self.schedule.synchronous:
            self._note_gradient(head, results)
        self.entry["round"] = head.round
        same = self.head.state_hash == head.state_hash
        self.heads.append(head)
        self.snapshots.publish(state.tree, state.tensors, msgspec.msgpack.encode(head), results)
        self.trainer.adopt(state.theta, () if same else state.changed if merged is not None else None, head)
        if merged is not None and not merged:
            self.replica.host.events.emit("round_empty", round=head.round, members=len(head.members))

    def donors(self, head: Head) -> Iterable[str]:
        return self.mates

    def _note_gradient(self, head: Head, results: list[memoryview]) -> None:
        """Note the merged gradient as every member has decoded it; a dense method's coding is the same in every
        round."""
        state = self.state
        coding = state.strategy.coding(self.schedule.round_info(head), state.tensors)
        merged = self.gradients[head.round] = torch.empty_like(state.theta)
        for index, result in enumerate(results):
            for place, values in coding.updates(index, result):
                merged[place] = values


def _first_round(table: Table) -> int | None:
    return max((entry.get("round", 0) for entry in table.values() if entry["stage"] == 0), default=None)


def entry_of(replica: Replica) -> dict[str, Any]:
    """Return the replica's entry of the table."""
    return {"stage": replica.stage, "addresses": list(replica.host.addresses), "session": secrets.token_hex(4)}


def genesis_of(setting: Setting, stage: int) -> Head:
    """Return the head of round 0 of a stage's group, without members."""
    return genesis(setting.rules.groups[stage], _first_state(setting, stage)[1].tree.root)


def _first_state(setting: Setting, stage: int) -> tuple[OuterStrategy, OuterState]:
    theta = split_flat(MODEL, init_flat(MODEL, seed=0), SPLITS[setting.stages])[stage]
    layout = FlatLayout.of(MODEL, SPLITS[setting.stages][stage])
    strategy = build_strategy(setting.outer, setting.codec, layout, setting.inner)
    return strategy, OuterState([theta.clone(), *(torch.zeros_like(theta) for _ in strategy.shared)], strategy)


def config_of(setting: Setting, stage: int, table: Table, authority: Identity, peer: str) -> AgreementConfig:
    """Return the part of a peer in a stage's group, which begins once all of its replicas in the table are here."""
    return AgreementConfig(
        genesis=genesis_of(setting, stage),
        peer=peer,
        coordinator=authority.peer_id,
        rounds=setting.rounds,
        min_peers=sum(entry["stage"] == stage for entry in table.values()),
    )


def schedule_of(setting: Setting, stage: int) -> RoundSchedule:
    return RoundSchedule(setting.outer, setting.inner, SEQ, 600.0, stage, setting.stages, MICRO)


@asynccontextmanager
async def open_coordinator(setting: Setting, table: Table, authority: Identity, folder: Path) -> AsyncIterator[None]:
    """Run the coordinator of all stages' groups inside the block, and put it into the table."""
    async with open_host(HostConfig(identity=authority, events=EventLog())) as host, trio.open_nursery() as nursery:
        for peer, entry in table.items():
            host.book.add(peer, entry["addresses"])
        stages = range(setting.stages)
        configs = [config_of(setting, stage, table, authority, host.peer_id) for stage in stages]
        table[host.peer_id] = {"stage": NO_STAGE, "addresses": list(host.addresses)}
        drivers: dict[str, GroupDriver] = {}
        for stage, config in zip(stages, configs, strict=True):
            strategy, _ = _first_state(setting, stage)
            work = work_of(strategy, schedule_of(setting, stage), lambda head: EXCHANGE_S)
            mates = [peer for peer, entry in table.items() if entry["stage"] == stage]
            records = RecordFiles(folder / f"coordinator-{stage}")
            driver = GroupDriver(host, config, work, records, AdaptiveTimeouts(60.0), lambda mates=mates: mates)
            driver.begin([])
            drivers[driver.group] = driver
            nursery.start_soon(driver.run, Weightless())
        serve_agreement(host.rpc, lambda: drivers)
        yield
        nursery.cancel_scope.cancel()


@asynccontextmanager
async def open_member(
    replica: Replica, setting: Setting, table: Table, authority: Identity, folder: Path
) -> AsyncIterator[StageMember]:
    """Open a member that is ready to run. `table` has all replicas by peer id."""
    stage, rules, host = replica.stage, setting.rules, replica.host
    strategy, state = _first_state(setting, stage)
    mates = {peer: entry for peer, entry in table.items() if entry["stage"] == stage}
    members = tuple(Member(peer, entry["session"]) for peer, entry in mates.items())
    head = begun(genesis(rules.groups[stage], state.tree.root), members, 1)
    schedule = schedule_of(setting, stage)
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
    entry = table[host.peer_id]
    member = StageMember(replica, state, schedule, trainer, snapshots, list(mates), entry, setting.rounds, head)
    parts = ReplicaParts(host, state, snapshots, trainer, schedule, AdaptiveTimeouts(60.0), folder / host.peer_id)
    config = config_of(setting, stage, table, authority, host.peer_id)
    work = work_of(strategy, schedule, lambda head: EXCHANGE_S)
    member.driver = ReplicaDriver(parts, config, work, lambda: [*mates, authority.peer_id])
    for peer, entry in table.items():
        host.book.add(peer, entry["addresses"])
    host.watch(table, "pipeline")
    trainer.adopt(state.theta, None, head)
    await member.driver.begin(member)
    async with server.open(trainer), trio.open_nursery() as nursery:
        member.nursery = nursery
        nursery.start_soon(trainer.run)
        yield member
        nursery.cancel_scope.cancel()
