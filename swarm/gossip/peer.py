"""One volunteer's peer in a gossip run: what `swarm.training.peer` puts together for other runs.

Checkpoints hold this peer's own weights and momentum: there are no others. After a restart it goes on from them, or, if
the others are too far ahead by then, from the weights of one of those.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
import trio

from dht.node import Node
from optim.codecs import get_codec
from optim.config import GossipConfig
from optim.strategies.interface import RoundInfo
from peer.checkpoint.hash_tree import hash_state
from peer.checkpoint.store import CheckpointStore
from peer.compute.train_loop import learning_rate
from peer.model.layout import init_flat
from peer.net.host import Host
from peer.worker.client import WorkerGroup
from swarm.gossip.coding import PairCoding
from swarm.gossip.context import GossipContext, GossipRules, Trained
from swarm.gossip.engine import GossipEngine
from swarm.gossip.messages import SLICE_BYTES_MAX
from swarm.gossip.pairing import PeerView
from swarm.gossip.replica import Replica
from swarm.membership.membership import LocalStatus, MemberRecord, Membership, member_record
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range
from swarm.protocol.plan import Assignment
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainer import TrainRequest
from swarm.rounds.worker_trainer import WorkerTrainer
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.manifest import Manifest
from swarm.state.snapshots import SnapshotStore

COMPUTE_S_MAX: Final = 3600.0
CHECKPOINT_EVERY_S: Final = 10.0
VECTORS: Final = ("theta", "move")


@dataclass(frozen=True)
class GossipPeerContext:
    """All of one machine that a run needs, opened. `name` is what others see."""

    name: str
    home: Home
    manifest: Manifest
    host: Host
    gate: Gate
    node: Node
    worker_group: WorkerGroup


async def run_gossip(peer_context: GossipPeerContext) -> None:
    """Take part until this peer's round is the run's last; its state is on disk then, also when cancelled."""
    store = CheckpointStore(
        peer_context.home.checkpoints,
        peer_context.host.identity,
        peer_context.manifest.run_id,
        peer_context.host.events,
    )
    store.prepare()
    replica = await trio.to_thread.run_sync(_initial, store, peer_context.manifest)
    await _GossipParticipant(peer_context, store, replica).run()


def _initial(store: CheckpointStore, manifest: Manifest) -> Replica:
    """The last checkpoint, or the run's initial weights. Where these come out differently on this machine (or the run
    began from a checkpoint), they must be fetched: round -1."""
    loaded = store.load_latest()
    if loaded is not None and tuple(loaded.tensors) == VECTORS:
        theta, move = loaded.tensors.values()
        return Replica.at(msgspec.msgpack.decode(loaded.head, type=Head), theta, move)
    theta = init_flat(manifest.model, manifest.run.seed)
    known = hash_state([theta]).root == manifest.genesis[0]
    return Replica(theta, torch.zeros_like(theta), 0 if known else -1)


class _Worker:
    """The engine's Trainee: the gang's inner steps."""

    def __init__(self, me: Member, trainer: WorkerTrainer, manifest: Manifest, numel: int) -> None:
        self._me, self._trainer, self._manifest = me, trainer, manifest
        self._whole = (slice(0, numel),)

    @property
    def speed(self) -> float:
        return self._trainer.speed

    async def train(self, samples: tuple[Range, ...], first_step: int, steps: int, deadline_s: float) -> Trained:
        round_info = RoundInfo(first_step // self._manifest.outer.steps + 1, first_step, self._rate(first_step))
        request = TrainRequest(Assignment(self._me, samples, steps), round_info, self._whole, 1, deadline_s)
        work = await self._trainer.train(request)
        return Trained(work.steps, work.samples, work.loss, work.product)

    def adopt(self, theta: torch.Tensor) -> None:
        self._trainer.adopt(theta, None)

    def _rate(self, step: int) -> float:
        return learning_rate(self._manifest.inner, step)


class _GossipParticipant:
    """Keeps what the engine makes: checkpoints, the published record. Implements the engine's Keeper."""

    def __init__(self, peer_context: GossipPeerContext, store: CheckpointStore, replica: Replica) -> None:
        manifest, host, worker_group = peer_context.manifest, peer_context.host, peer_context.worker_group
        self._peer_context, self._store, self._replica = peer_context, store, replica
        self._joined_at, self._saved_at = time.time(), trio.current_time()
        self._saved: Head | None = None
        self._tasks: trio.Nursery | None = None
        self._me = Member(host.peer_id, secrets.token_hex(8))
        self._trainer = WorkerTrainer(worker_group, "delta", host.events)
        self._trainer.adopt(replica.theta, None)
        snapshots = SnapshotStore(replica.size_bytes, SLICE_BYTES_MAX)
        snapshots.serve(host.rpc)
        worker = _Worker(self._me, self._trainer, manifest, worker_group.layout.numel)
        timeouts = AdaptiveTimeouts(manifest.run.timeout_floor_s)
        context = GossipContext(
            self._me, host, worker, self, timeouts, snapshots, peer_context.home.state_part, host.events
        )
        coding = PairCoding(worker_group.layout.numel, get_codec(manifest.codec.up), get_codec(manifest.codec.down))
        self._engine = GossipEngine(context, _rules(manifest), replica, coding)
        self._membership = Membership(peer_context.node, host, manifest.run_id, self._describe, host.events)

    async def run(self) -> None:
        try:
            async with trio.open_nursery() as nursery:
                self._tasks = nursery
                nursery.start_soon(self._membership.run)
                await self._engine.run()
                await self._finish()
                nursery.cancel_scope.cancel()
        finally:
            with trio.CancelScope(shield=True):
                await self._save(self._engine.head)

    # -- Keeper ------------------------------------------------------------------------------------------------------

    def others(self) -> Mapping[str, PeerView]:
        view = self._membership.view.items()
        return {peer: PeerView(r.round, r.speed) for peer, r in view if r.role == "full" and peer != self._me.peer}

    def banned(self) -> Iterable[str]:
        bans = self._peer_context.gate.bans
        return bans.peers if bans is not None else ()

    async def stepped(self, head: Head) -> None:
        """Ask for what is due after a step."""
        self._trainer.validate_round = head.round if self._measures else None
        now = trio.current_time()
        if now - self._saved_at >= CHECKPOINT_EVERY_S and self._tasks is not None:
            self._saved_at = now
            self._tasks.start_soon(self._save, head)  # it copies at once, and theta rests while we train

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _measures(self) -> bool:
        """One peer measures the held-out loss, of its own weights."""
        return all(self._me.peer < peer for peer in self.others())

    def _describe(self) -> MemberRecord:
        own = LocalStatus(
            session=self._me.session,
            name=self._peer_context.name,
            role="full",
            phase=self._engine.phase,
            joined_at=self._joined_at,
            speed=self._trainer.speed,
            loss=self._trainer.loss,
            val_loss=self._trainer.val_loss,
        )
        return member_record(self._peer_context.host, self._engine.head, own)

    async def _finish(self) -> None:
        head = self._engine.head
        if self._measures:
            self._trainer.validate_round = head.round
            await self._trainer.validate()
        self._peer_context.host.events.emit("run_finished", round=head.round, state_hash=head.state_hash.hex())

    async def _save(self, head: Head) -> None:
        if head == self._saved or head.round < 0:
            return
        named = dict(zip(VECTORS, (self._replica.theta, self._replica.move), strict=True))
        if await self._store.save(
            head.round, msgspec.msgpack.encode(head), named, self._peer_context.worker_group.layout
        ):
            self._saved = head


def _rules(manifest: Manifest) -> GossipRules:
    outer, run = manifest.outer, manifest.run
    assert isinstance(outer, GossipConfig)
    return GossipRules(
        run_id=manifest.run_id,
        genesis=manifest.genesis[0],
        authority=manifest.authority,
        steps=outer.steps,
        batch_size=manifest.inner.batch_size,
        seq_len=manifest.data.seq_len,
        rounds=run.rounds,
        min_peers=run.min_peers,
        compute_s_max=COMPUTE_S_MAX,
        timeout_floor_s=run.timeout_floor_s,
        constants=(outer.alpha, outer.beta, outer.gamma),
    )
