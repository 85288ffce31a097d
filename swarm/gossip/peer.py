"""One volunteer's peer in a gossip run: what `swarm.training.replica` is to other runs.

Checkpoints hold this peer's own weights and momentum, as there are no common ones. After a restart the peer continues
from them or, if the others are too far ahead by then, from the weights of another peer.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from typing import Final

import msgspec
import torch
import trio

from optim.codecs import get_codec
from optim.config import GossipConfig
from optim.strategies.interface import RoundInfo
from peer.catalogue.machine import LastCheckpointFailed
from peer.checkpoint.generation import StateGeneration
from peer.checkpoint.hash_tree import hash_state
from peer.checkpoint.store import CheckpointStore
from peer.compute.train_loop import learning_rate
from peer.errors import ResourceError
from peer.model.layout import init_flat
from peer.worker.client import WorkerGroup
from swarm.gossip.coding import PairCoding
from swarm.gossip.context import GossipContext, GossipRules
from swarm.gossip.engine import GossipEngine
from swarm.gossip.messages import SLICE_BYTES_MAX
from swarm.gossip.pairing import PeerView
from swarm.gossip.replica import Replica
from swarm.membership.living import note_living
from swarm.membership.member_record import MEMBERS, MemberRecord, measured_record, member_record
from swarm.membership.membership import REFRESH_S, Membership
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range
from swarm.protocol.plan import Assignment
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainers.last_save import lost_round, save_or_wait
from swarm.rounds.trainers.trainer import TrainRequest, TrainResult
from swarm.rounds.trainers.upkeep import ReplicaUpkeep
from swarm.rounds.trainers.worker_trainer import WorkerTrainer
from swarm.run.manifest import Manifest
from swarm.run.owners_pause import PAUSED, obey
from swarm.run.peer_context import PeerContext
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore

TELL_S: Final = REFRESH_S + 1.0  # in which the coordinator reads that this peer has made its last round
VECTORS: Final = ("theta", "move")


async def run_gossip(context: PeerContext, worker_group: WorkerGroup) -> None:
    """Take part until this peer's round is the run's last. Its state is saved at the end, also when cancelled."""
    host, manifest = context.host, context.manifest
    store = CheckpointStore(context.home.checkpoints, host.identity, manifest.run_id, host.events)
    store.prepare()
    replica = await trio.to_thread.run_sync(_initial, store, manifest)
    await _GossipParticipant(context, worker_group, store, replica).run()


def _initial(store: CheckpointStore, manifest: Manifest) -> Replica:
    """Load the last checkpoint, or make the run's initial weights. Where these come out differently on this machine (or
    the run began from a checkpoint), round -1 says that the peer must fetch a state."""
    loaded = store.load_latest()
    if loaded is not None and tuple(loaded.tensors) == VECTORS:
        theta, move = loaded.tensors.values()
        return Replica.at(msgspec.msgpack.decode(loaded.head, type=Head), theta, move)
    theta = init_flat(manifest.model, manifest.run.seed)
    known = hash_state([theta]).root == manifest.genesis[0]
    return Replica(theta, torch.zeros_like(theta), 0 if known else -1)


class _InnerSteps:
    """The inner steps of a worker group. Implements `swarm.gossip.context.GossipTrainer`."""

    def __init__(self, me: Member, trainer: WorkerTrainer, manifest: Manifest, numel: int) -> None:
        self._me, self._trainer, self._manifest = me, trainer, manifest
        self._whole = (slice(0, numel),)

    @property
    def speed(self) -> float:
        return self._trainer.speed

    async def train(self, samples: tuple[Range, ...], first_step: int, steps: int, deadline_s: float) -> TrainResult:
        round_info = RoundInfo(first_step // self._manifest.outer.steps + 1, first_step, self._rate(first_step))
        request = TrainRequest(Assignment(self._me, samples, steps), round_info, self._whole, 1, deadline_s)
        return await self._trainer.train(request)

    def adopt(self, theta: torch.Tensor) -> None:
        self._trainer.adopt(theta, None)

    def _rate(self, step: int) -> float:
        return learning_rate(self._manifest.inner, step)


class _GossipParticipant:
    """Saves checkpoints and publishes this peer's record. Implements `swarm.gossip.context.GossipListener`."""

    def __init__(
        self, context: PeerContext, worker_group: WorkerGroup, store: CheckpointStore, replica: Replica
    ) -> None:
        manifest, host = context.manifest, context.host
        self._context, self._store, self._replica, self._layout = context, store, replica, worker_group.layout
        self._joined_at = time.time()
        self._saved: Head | None = None
        self._awake = trio.Event()
        self._note_pause(context.pause.paused)
        self._me = Member(host.peer_id, secrets.token_hex(8))
        self._trainer = WorkerTrainer(worker_group, "delta", host.events, context.samples)
        self._trainer.adopt(replica.theta, None)
        self._upkeep = ReplicaUpkeep(self._trainer, self._save, host.events)
        snapshots = SnapshotStore(replica.size_bytes, SLICE_BYTES_MAX, events=host.events, slots=context.uploads)
        serve_snapshots(host.rpc, [snapshots])
        numel = worker_group.layout.numel
        inner_steps = _InnerSteps(self._me, self._trainer, manifest, numel)
        timeouts = AdaptiveTimeouts(manifest.run.timeout_floor_s)
        part_file = context.home.state_part
        gossip_context = GossipContext(self._me, host, inner_steps, self, timeouts, snapshots, part_file)
        coding = PairCoding(numel, get_codec(manifest.codec.up), get_codec(manifest.codec.down))
        self._engine = GossipEngine(gossip_context, _rules(manifest), replica, coding)
        self._begun = self._engine.head
        self._membership = Membership(context.node, host, MEMBERS, manifest.run_id, self._describe)

    async def run(self) -> None:
        """Raises ResourceError if the state is lost, as the disk is full and there is no other peer."""
        try:
            async with self._upkeep.open(lambda: self._engine.head) as tasks:
                tasks.start_soon(self._membership.run)
                tasks.start_soon(obey, self._context.pause, self._trainer, self._note_pause)
                tasks.start_soon(note_living, self._context.host, self._context.home, self._membership.others)
                await self._engine.run()
                await self._membership.announce()
                await trio.sleep(TELL_S)
                await self._upkeep.finish(self._engine.head, self._measures)
        finally:
            with trio.CancelScope(shield=True):
                await self._save_last(self._engine.head)

    # -- GossipListener ----------------------------------------------------------------------------------------------

    def others(self) -> Mapping[str, PeerView]:
        records = self._membership.others().items()
        return {peer: PeerView(record.round, record.speed) for peer, record in records if _works(record)}

    async def working(self) -> None:
        await self._awake.wait()

    def _note_pause(self, paused: bool) -> None:
        if paused:
            self._awake = trio.Event()
        else:
            self._awake.set()

    def banned(self) -> Iterable[str]:
        bans = self._context.gate.bans
        return bans.peers if bans is not None else ()

    async def stepped(self, head: Head) -> None:
        # A save copies the state at once, and theta does not change while the worker trains.
        self._upkeep.committed(head, self._measures)

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _measures(self) -> bool:
        """Whether this peer measures the held-out loss, of its own weights, for the whole run."""
        return all(self._me.peer < peer for peer in self.others())

    def _describe(self) -> MemberRecord:
        record = member_record(
            self._context.host,
            self._engine.head,
            session=self._me.session,
            name=self._context.config.name,
            role="full",
            phase=PAUSED if self._context.pause.paused else self._engine.phase,
            joined_at=self._joined_at,
        )
        return msgspec.structs.replace(measured_record(record, self._trainer), credential=self._context.gate.chain)

    async def _save(self, head: Head) -> bool:
        """Return whether the disk has the state of `head`, or there is none yet."""
        if head == self._saved or head.round < 0:
            return True
        vectors = (self._replica.theta.clone(), self._replica.move.clone())  # at once: both change in place
        state = StateGeneration(dict(zip(VECTORS, vectors, strict=True)))
        if await self._store.save(head.round, msgspec.msgpack.encode(head), state, self._layout):
            self._saved = head
        return head == self._saved

    async def _save_last(self, head: Head) -> None:
        """Save the state of a peer that leaves, if it has learned anything. Each peer's weights are its own, but any
        will do for the run: none waits for room while there is another peer with a lower id, so that not all rely on
        each other."""
        home, events = self._context.home.path, self._context.host.events

        def held_elsewhere() -> bool:
            return any(peer < self._me.peer for peer in self.others())

        if head == self._begun:
            return
        if await save_or_wait(lambda: self._save(head), held_elsewhere, head.round, home, events):
            return
        on_disk = await trio.to_thread.run_sync(self._store.list)
        what = lost_round(head.round, home, on_disk[-1].round if on_disk else None)
        sentence = f"{what}; no other peer of the run was there, so these weights are lost: free some space"
        events.emit(LastCheckpointFailed(round=head.round, lost=True, error=sentence))
        raise ResourceError(sentence)


def _works(record: MemberRecord) -> bool:
    return record.role == "full" and record.phase != PAUSED


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
        compute_s_max=run.compute_s_max,
        timeout_floor_s=run.timeout_floor_s,
        constants=(outer.alpha, outer.beta, outer.gamma),
    )
