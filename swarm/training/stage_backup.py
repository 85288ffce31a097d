"""Backups of a stage at peers of another stage, so that it outlives all of its replicas.

A replica of stage s holds a recent commit of stage s + 1 (of the first stage, if s is the last), together with its
proof (`swarm.protocol.agreement.proof`). A stage has few backup holders, and they refresh so seldom that it takes a
small share of the link. A peer that takes a stage without replicas begins with such a backup
(`swarm.training.restore`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import trio
from blake3 import blake3

from peer.catalogue.stages import BackupSaved
from peer.checkpoint.checkpoint_file import LoadedCheckpoint
from peer.checkpoint.generation import StateGeneration
from peer.errors import BarnraiseError
from peer.net.rpc import Call, Method
from peer.net.wire import LARGE_HEADER_BYTES
from swarm.membership.member_record import MemberRecord, MemberView, Stage
from swarm.membership.proven_heads import ProvenHead, ask_proven_heads
from swarm.placement.commits import fetch_commit, save_commit
from swarm.placement.stages import open_store, state_bytes
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.proof import HeadProof
from swarm.protocol.head import Head
from swarm.protocol.messages import SLICE_BYTES_MAX
from swarm.run.agreement import agreement_config
from swarm.run.peer_context import PeerContext
from swarm.state.snapshots import SnapshotStore
from swarm.training.checkpoints import proof_of

BACKUP_HOLDERS: Final = 2  # of each stage
EVERY_S: Final = 15.0
LINK_SHARE: Final = 0.05  # of a backup holder's time, at most
FIRST_S: Final = 10.0
ASK_S: Final = 4.0
ASKED_MAX: Final = 16


class AskBackup(msgspec.Struct, frozen=True):
    """Which commit of that stage do you hold? The receiver serves it as a snapshot from then on."""

    stage: Stage


class BackupHead(msgspec.Struct, frozen=True):
    """The commit held, and its proof; None where there is none."""

    head: Head | None = None
    links: HeadProof = ()


HELD_BACKUP: Final = Method("backup.held", AskBackup, BackupHead, header_bytes=LARGE_HEADER_BYTES)


class StageBackup:
    """The backup of the next stage at one replica of `stage`; `snapshots` serves it to other peers."""

    def __init__(self, context: PeerContext, stage: int, known: MemberView) -> None:
        self._context, self._known = context, known
        self._manifest, self._host = context.manifest, context.host
        self.of = (stage + 1) % self._manifest.stages
        self.snapshots: Final = SnapshotStore(
            state_bytes(self._manifest, self.of), SLICE_BYTES_MAX, events=self._host.events
        )
        self._store = open_store(context.home, self._manifest, self.of, self._host.identity, self._host.events)
        self._head: Head | None = None
        self._lock = trio.Lock()
        self._held: BackupHead | None = None
        self._host.rpc.register(HELD_BACKUP, self._on_held)

    async def run(self) -> None:
        """Refresh the backup until cancelled."""
        await trio.to_thread.run_sync(self._store.prepare)
        self._head = await trio.to_thread.run_sync(self._on_disk)
        await trio.sleep(FIRST_S)
        while True:
            began = trio.current_time()
            if self._is_backup_holder:
                try:
                    await self._refresh()
                except BarnraiseError as error:
                    self._host.events.emit("backup_stale", stage=self.of, reason=str(error))
            took_s = trio.current_time() - began
            await trio.sleep(max(EVERY_S, took_s / LINK_SHARE))

    @property
    def _is_backup_holder(self) -> bool:
        """Whether this peer is among the replicas of its stage that back up the next one: by rendezvous hashing, so all
        agree."""
        before = (self.of - 1) % self._manifest.stages
        mates = {peer for peer, record in self._known().items() if record.role == "stage" and record.stage == before}
        ranked = sorted({*mates, self._host.peer_id}, key=lambda peer: rendezvous_rank(peer, self.of))
        return self._host.peer_id in ranked[:BACKUP_HOLDERS]

    async def _refresh(self) -> None:
        """Fetch the state of that group's highest proven head, unless that or a later one is held already: once all
        replicas are gone, a newcomer to their stage shows the run's first head, and this backup is all that is left."""
        found = await newest_seen(self._context, self.of, self._known())
        if found is None or (self._head is not None and position_of(found.head) <= position_of(self._head)):
            return
        fetched = await fetch_commit(self._context, self.of, found)
        async with self._lock:
            self._held = None
            if await save_commit(self._context, self.of, found, fetched):
                self._head, donors = found.head, len(found.holders)
                self._host.events.emit(BackupSaved(stage=self.of, round=found.head.round, donors=donors))

    def _on_disk(self) -> Head | None:
        """Return the head of the commit that a process before this one has left, if it can be proved."""
        loaded = self._store.load_latest()
        head = msgspec.msgpack.decode(loaded.head, type=Head) if loaded is not None else None
        return head if head is not None and proof_of(self._context, self.of, head) is not None else None

    async def _on_held(self, call: Call[AskBackup]) -> BackupHead:
        if call.body.stage != self.of:
            return BackupHead()
        async with self._lock:
            if self._held is None:
                loaded = await trio.to_thread.run_sync(self._store.load_latest)
                self._held = (
                    await trio.to_thread.run_sync(self._publish, loaded) if loaded is not None else BackupHead()
                )
            return self._held

    def _publish(self, loaded: LoadedCheckpoint) -> BackupHead:
        self.snapshots.publish(StateGeneration(loaded.tensors, loaded.tree), loaded.head)
        head = msgspec.msgpack.decode(loaded.head, type=Head)
        proof = proof_of(self._context, self.of, head)
        return BackupHead() if proof is None else BackupHead(head, proof)


async def newest_seen(context: PeerContext, stage: int, records: Mapping[str, MemberRecord]) -> ProvenHead | None:
    """Return the highest proven head of the group of `stage` whose state a peer holds; None before the group began."""
    asked = [peer for peer, record in records.items() if record.role == "stage" and record.stage == stage]
    config = agreement_config(context.manifest, stage, context.host.peer_id)
    found = await ask_proven_heads(context.host, config, asked, ASK_S, ASKED_MAX)
    return next((proven for proven in found if proven.holders and proven.head.members), None)


def rendezvous_rank(peer: str, stage: int) -> bytes:
    """Return the rank of `peer` by rendezvous hashing: the lowest are the backup holders of `stage`."""
    return blake3(f"{peer}/{stage}".encode()).digest()
