"""Backups of a stage at peers of another stage, so that it outlives all of its replicas.

A replica of stage s holds a recent commit of stage s + 1 (of the first stage, if s is the last), together with the
authority's signature of its term. A stage has few backup holders, and they refresh so seldom that it takes a small
share of the link. A peer that takes a stage without replicas begins with such a backup (`swarm.training.restore`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import msgspec
import trio
from blake3 import blake3

from peer.checkpoint.checkpoint_file import LoadedCheckpoint
from peer.errors import BarnraiseError
from peer.files import write_atomically
from peer.identity import Signed
from peer.net.rpc import Call, Method
from peer.net.wire import LARGE_HEADER_BYTES
from swarm.membership.member_record import MemberRecord, MemberView, Stage
from swarm.placement.stages import layout_of, open_store, state_bytes, vectors_of
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import SLICE_BYTES_MAX
from swarm.protocol.quorum import ask_head_reports, rank_heads
from swarm.run.peer_context import PeerContext
from swarm.state.fetch import Fetched, fetch_state
from swarm.state.snapshots import SnapshotStore
from swarm.training.checkpoints import regroup_of

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
    """The commit held, and the authority's signature of its term; None where there is none."""

    head: Head | None = None
    regroup: Signed | None = None


HELD_BACKUP: Final = Method("backup.held", AskBackup, BackupHead, header_bytes=LARGE_HEADER_BYTES)


class StageBackup:
    """The backup of the next stage at one replica of `stage`; `snapshots` serves it to other peers."""

    def __init__(self, context: PeerContext, stage: int, known: MemberView) -> None:
        self._context, self._known = context, known
        self._manifest, self._host = context.manifest, context.host
        self.of = (stage + 1) % self._manifest.stages
        self.snapshots: Final = SnapshotStore(state_bytes(self._manifest, self.of), SLICE_BYTES_MAX)
        self._store = open_store(context.home, self._manifest, self.of, self._host.identity, self._host.events)
        self._head: Head | None = None
        self._lock = trio.Lock()
        self._held: BackupHead | None = None
        self._host.rpc.register(HELD_BACKUP, self._on_held)

    async def run(self) -> None:
        """Refresh the backup until cancelled."""
        await trio.to_thread.run_sync(self._store.prepare)
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
        """Fetch the state of the head that a majority of that group stands at, unless it is held already."""
        found = await newest_seen(self._context, self.of, self._known())
        if found is None or found[0] == self._head:
            return
        head, regroup, holders = found
        fetched = await fetch_commit(self._context, self.of, head, holders)
        async with self._lock:
            self._held = None
            if await save_backup(self._context, self.of, head, regroup, fetched):
                self._head = head
                self._host.events.emit("backup_saved", stage=self.of, round=head.round, donors=len(holders))

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
        self.snapshots.publish(loaded.tree, list(loaded.tensors.values()), loaded.head)
        head, manifest = msgspec.msgpack.decode(loaded.head, type=Head), self._context.manifest
        folder = self._context.home.stage(self.of, manifest.stages)
        return BackupHead(head, regroup_of(folder, manifest.authority, head))


async def newest_seen(
    context: PeerContext, stage: int, records: Mapping[str, MemberRecord]
) -> tuple[Head, Signed | None, tuple[str, ...]] | None:
    """Return the head that the group of `stage` stands at, the signature of its term, and the holders of its state.
    Where a majority of the members that the authority began the term with answers, no other report counts."""
    manifest, first = context.manifest, context.manifest.first_head(stage)
    asked = [peer for peer, record in records.items() if record.role == "stage" and record.stage == stage]
    head_reports = await ask_head_reports(context.host.rpc, asked[:ASKED_MAX], ASK_S, group=first.run_id)
    me = Member(context.host.peer_id, "")
    candidates = rank_heads(head_reports, manifest.authority, first, me, first)
    if not candidates or not candidates[0].head.members:
        return None
    best = candidates[0]
    return best.head, best.regroup, best.holders


async def save_backup(context: PeerContext, stage: int, head: Head, regroup: Signed | None, state: Fetched) -> bool:
    """Write a fetched state of `stage` to disk, as a replica of it does; return whether that went well."""
    manifest, host = context.manifest, context.host
    store = open_store(context.home, manifest, stage, host.identity, host.events)
    await trio.to_thread.run_sync(store.prepare)
    named = dict(zip(vectors_of(manifest, stage), state.tensors, strict=True))
    layout = layout_of(manifest, stage)
    if not await store.save(max(head.round, 0), msgspec.msgpack.encode(head), named, layout):
        return False
    if regroup is not None:
        folder = context.home.stage(stage, manifest.stages)
        await trio.to_thread.run_sync(write_atomically, folder.regroup, msgspec.msgpack.encode(regroup))
    return True


async def fetch_commit(context: PeerContext, stage: int, head: Head, holders: tuple[str, ...]) -> Fetched:
    """Fetch the state of `head`, checked against its hash. Raises NetworkError, ResourceError."""
    folder = context.home.stage(stage, context.manifest.stages)
    await trio.to_thread.run_sync(lambda: folder.path.mkdir(parents=True, exist_ok=True))
    return await fetch_state(
        context.host.rpc,
        lambda: holders,
        head.state_hash,
        state_bytes(context.manifest, stage),
        folder.path / "backup.part",
        context.host.events,
        len(vectors_of(context.manifest, stage)),
    )


def rendezvous_rank(peer: str, stage: int) -> bytes:
    """Return the rank of `peer` by rendezvous hashing: the lowest are the backup holders of `stage`."""
    return blake3(f"{peer}/{stage}".encode()).digest()
