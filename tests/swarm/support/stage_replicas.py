"""Replicas of a small model's stages with their drivers, over real sockets and with real workers. A static table of
replicas stands in for the DHT, and a throwaway key for the coordinator: it signs the start of the first term."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
import trio

from optim.config import AllReduceConfig, CodecConfig, OuterConfig
from optim.strategies.registry import build_strategy
from peer.checkpoint.hash_tree import hash_state
from peer.config import InnerConfig
from peer.identity import Identity, sign_body
from peer.model.layout import init_flat, split_flat
from swarm.membership.proven_heads import ask_proven_heads
from swarm.pipeline.accounting import SampleAccounting
from swarm.pipeline.config import LoadReport, PipelineSettings
from swarm.pipeline.local_steps import LocalSteps
from swarm.pipeline.recovery.lost_samples import LostSamples
from swarm.pipeline.recovery.redispatch import Redispatcher
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageServer
from swarm.pipeline.stage_trainer import StageTrainer
from swarm.pipeline.synchronous import BatchTracker, Synchronous
from swarm.protocol.agreement import events
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.messages import ChainLink, ChainMessage, StartBody
from swarm.protocol.agreement.records import IDENTITY_KEY
from swarm.protocol.agreement.rules.evidence import START
from swarm.protocol.head import Head, Member, genesis
from swarm.protocol.ledger import Range
from swarm.protocol.plan import Contribution
from swarm.protocol.receipts import StageProof
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.context import RoundContext
from swarm.rounds.records import RecordFiles
from swarm.rounds.replica_driver import ReplicaDriver, restore_replica
from swarm.rounds.work import work_of, work_timeout
from swarm.state.outer_state import OuterState
from swarm.state.server import serve_snapshots
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
    """One replica that takes part in its group's rounds. Implements the driver's `CommitListener`."""

    replica: Replica
    trainer: StageTrainer
    snapshots: SnapshotStore
    driver: ReplicaDriver
    first: Head  # of the group's first term
    start: ChainMessage
    others: Callable[[], Iterable[str]]
    entry: dict[str, Any]  # in the table: its round, as records say it
    heads: list[Head] = field(default_factory=list)  # of rounds that were committed
    merged: list[tuple[tuple[Range, ...], ...]] = field(default_factory=list)
    gradients: dict[int, torch.Tensor] = field(default_factory=dict)  # synchronous: what each round has merged

    @property
    def context(self) -> RoundContext:
        return self.driver.actor.context

    @property
    def head(self) -> Head:
        """Its last commit, else the first head of its group."""
        return self.heads[-1] if self.heads else self.first

    async def run(self, done: Callable[[], Awaitable[None]] | None = None) -> None:
        """Take part until the last round is committed here, and then until `done` returns."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.driver.run)
            self.driver.group.feed(events.Received(self.driver.group.config.coordinator, self.start))
            await self.driver.until_round(self.driver.group.config.rounds)
            if done is not None:
                await done()
            nursery.cancel_scope.cancel()

    async def committed(self, head: Head, merged: Sequence[Contribution] | None) -> None:
        state = self.context.state
        assert state.tree.root == head.state_hash
        if head == self.first:
            return
        self.merged.append(tuple(body.counted for body in merged or ()))
        led = self.snapshots._results.get(self.head.state_hash)
        if led is not None and led.leads_to == head.state_hash and self.context.schedule.synchronous:
            self._note_gradient(head, led.parts)
        if merged is not None and not merged:
            self.replica.host.events.emit("round_empty", round=head.round, members=len(head.members))
        self.entry["round"] = head.round
        same = self.head.state_hash == head.state_hash
        self.heads.append(head)
        changed = () if same else state.changed if merged is not None else None
        self.trainer.adopt(state.theta, changed, head)

    def donors(self, head: Head) -> Iterable[str]:
        return self.others()

    def _note_gradient(self, head: Head, results: Sequence[memoryview]) -> None:
        """Note the merged gradient as every member has decoded it; a dense method's coding is the same in every
        round."""
        state = self.context.state
        coding = state.strategy.coding(self.context.schedule.round_info(head), state.tensors)
        merged = self.gradients[head.round] = torch.empty_like(state.theta)
        for index, result in enumerate(results):
            for place, values in coding.updates(index, result):
                merged[place] = values


async def run_members(members: Sequence[StageMember]) -> None:
    """Run these until each has committed the last round."""
    left, all_done = len(members), trio.Event()

    async def done() -> None:
        nonlocal left
        left -= 1
        if not left:
            all_done.set()
        await all_done.wait()

    async with trio.open_nursery() as nursery:
        for member in members:
            nursery.start_soon(member.run, done)


def _first_round(table: Table) -> int | None:
    return max((entry.get("round", 0) for entry in table.values() if entry["stage"] == 0), default=None)


def entry_of(replica: Replica) -> dict[str, Any]:
    """Return the replica's entry of the table."""
    return {"stage": replica.stage, "addresses": list(replica.host.addresses), "session": secrets.token_hex(4)}


@asynccontextmanager
async def open_member(
    replica: Replica, setting: Setting, table: Table, authority: Identity, folder: Path
) -> AsyncIterator[StageMember]:
    """Open a member that is ready to run. `table` has all replicas by peer id."""
    stage, rules, host = replica.stage, setting.rules, replica.host
    thetas = split_flat(MODEL, init_flat(MODEL, seed=0), SPLITS[setting.stages])
    strategy = build_strategy(setting.outer, setting.codec, replica.worker_group.layout, setting.inner)
    first_states = [[theta.clone(), *(torch.zeros_like(theta) for _ in strategy.shared)] for theta in thetas]
    state = OuterState.in_memory(first_states[stage], strategy)
    groups = [
        AgreementConfig(
            genesis=genesis(name, hash_state(tensors).root), peer=host.peer_id, coordinator=authority.peer_id
        )
        for name, tensors in zip(rules.groups, first_states, strict=True)
    ]
    begun = groups[stage].genesis
    mates = {peer: entry for peer, entry in table.items() if entry["stage"] == stage}
    members = tuple(sorted(Member(peer, entry["session"]) for peer, entry in mates.items()))
    head = msgspec.structs.replace(begun, term=1, boot=1, previous=begun.hash, members=members, attempt=-1)
    schedule = RoundSchedule(setting.outer, setting.inner, SEQ, 600.0, stage, setting.stages, MICRO, setting.rounds)
    accounting = SampleAccounting(head, MICRO, rules.round_samples or None, host.peer_id)

    def replicas_of(of: int) -> dict[str, LoadReport]:
        return {p: load for p, load in replicas_in(table, of, host).items() if p not in host.suspects}

    async def tokens(spans: Sequence[Range]) -> torch.Tensor:
        return torch.cat([tokens_of(span) for span in spans])

    async def prove(other: int) -> StageProof:
        """Return the proof of the newest head that another stage's replicas in the table report."""
        peers = [peer for peer, entry in table.items() if entry["stage"] == other]
        found = await ask_proven_heads(host, groups[other], peers)
        return found[0].links if found else ()

    server = StageServer(stage, rules, replica.worker_group, host, accounting, replicas_of, prove)
    replica.server = server
    source = None
    if stage == 0:
        source = replica.source = MicroBatchSource(server, tokens)
    redispatcher = Redispatcher(server, lambda: list(replicas_of(0)), source)
    trainer: StageTrainer
    if rules.synchronous:
        trainer = Synchronous(server, schedule, BatchTracker(server, schedule, redispatcher), source)
    else:
        lost = LostSamples(server, redispatcher, lambda: list(replicas_of(stage)), setting.rounds)
        trainer = LocalSteps(server, schedule, source, None, lambda: _first_round(table), lost if stage else None)
    snapshots = SnapshotStore(state.size_bytes, 9 << 20)
    serve_snapshots(host.rpc, [snapshots])
    parts = RoundContext(host, state, snapshots, trainer, schedule, AdaptiveTimeouts(60.0), folder / host.peer_id)
    # The group is known before its members start, so each has drawn its incarnation already.
    session = table[host.peer_id]["session"]
    RecordFiles(parts.folder / "agreement").write({IDENTITY_KEY: session.encode()})
    config = AgreementConfig(genesis=begun, peer=host.peer_id, coordinator=authority.peer_id, rounds=setting.rounds)
    timeout = work_timeout(schedule, parts.timeouts, lambda: trainer.speed)
    work = work_of(strategy, schedule, lambda head: 60.0, timeout, dict(enumerate(groups[: max(1, stage)])))
    driver = await restore_replica(parts, config, work, tuple)
    start = ChainMessage((ChainLink(head, start=sign_body(authority, START, StartBody(head))),))
    member = StageMember(replica, trainer, snapshots, driver, head, start, lambda: list(mates), table[host.peer_id])
    driver.actor.listener = member
    for peer, entry in table.items():
        host.book.add(peer, entry["addresses"])
    host.watch(table, "pipeline")
    trainer.adopt(state.theta, None, head)
    async with server.open(trainer), trio.open_nursery() as nursery:
        nursery.start_soon(trainer.run)
        yield member
        nursery.cancel_scope.cancel()
