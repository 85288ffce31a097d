"""So that a stage outlives all of its replicas: others keep a recent commit of it on disk.

A replica of stage s keeps one of stage s + 1 (of the first stage, if s is the last), together with the authority's
signature of its term: no more than a few keepers a stage, and refreshed so seldom that it takes a small share of the
link. Who takes a stage that nobody serves begins with the newest commit that is on its own disk or at a keeper; the
state is checked against the head, and the head is the authority's to accept.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Final

import msgspec
import trio
from blake3 import blake3

from peer.checkpoint_file import Loaded
from peer.errors import BarnraiseError, ProtocolViolation
from peer.identity import Signed
from peer.rpc import Call, Method
from swarm.chain import Head
from swarm.charter import write_atomically
from swarm.fetch import Fetched, fetch_state
from swarm.follow import ask_standings, open_regroup, weigh
from swarm.ground import Ground
from swarm.groups import layout_of, open_store, state_bytes, vectors_of
from swarm.membership import Known, MemberRecord
from swarm.messages import SLICE_BYTES_MAX
from swarm.moving import at_work
from swarm.snapshots import SnapshotShelf

KEEPERS: Final = 2  # of each stage
EVERY_S: Final = 45.0
DUTY: Final = 0.05  # of the time a keeper's link may be busy with it
FIRST_S: Final = 10.0
ASK_S: Final = 4.0
ASKED_MAX: Final = 16


class AskKept(msgspec.Struct, frozen=True):
    """Which commit of that stage do you keep? From then on it is on your shelf."""

    stage: int


class KeptHead(msgspec.Struct, frozen=True):
    """None where there is none."""

    head: Head | None = None
    regroup: Signed | None = None


KEPT: Final = Method("archive.kept", AskKept, KeptHead)


class Archive:
    """What one replica of `stage` keeps of the next one; `lent` is the shelf from which others may fetch it."""

    def __init__(self, ground: Ground, stage: int, known: Known) -> None:
        self._ground, self._known = ground, known
        self._manifest, self._host = ground.manifest, ground.host
        self.of = (stage + 1) % self._manifest.stages
        self.lent: Final = SnapshotShelf(state_bytes(self._manifest, self.of), SLICE_BYTES_MAX)
        self._store = open_store(ground.home, self._manifest, self.of, self._host.identity, self._host.events)
        self._home = ground.home.stage(self.of, self._manifest.stages)
        self._head: Head | None = None
        self._lending = trio.Lock()
        self._lent: KeptHead | None = None
        self._host.rpc.serve(KEPT, self._on_kept)

    async def run(self) -> None:
        """Refresh for ever."""
        await trio.to_thread.run_sync(self._store.prepare)
        await trio.sleep(FIRST_S)
        while True:
            began = trio.current_time()
            if self._is_keeper:
                try:
                    await self._refresh()
                except BarnraiseError as error:
                    self._host.events.emit("archive_stale", stage=self.of, reason=str(error))
            took_s = trio.current_time() - began
            await trio.sleep(max(EVERY_S, took_s / DUTY))

    @property
    def _is_keeper(self) -> bool:
        """Whether we are among those of our stage that keep the next one: by lot, so that all agree."""
        before = (self.of - 1) % self._manifest.stages
        mates = {peer for peer, record in self._known().items() if record.role == "stage" and record.stage == before}
        lots = sorted({*mates, self._host.peer_id}, key=lambda peer: blake3(f"{peer}/{self.of}".encode()).digest())
        return self._host.peer_id in lots[:KEEPERS]

    async def _refresh(self) -> None:
        """Fetch the head that a majority of that group stands at, unless it is kept already."""
        found = await newest_seen(self._ground, self.of, self._known())
        if found is None or found[0] == self._head:
            return
        head, regroup, holders = found
        fetched = await _fetch(self._ground, self.of, head, holders)
        async with self._lending:
            self._lent = None
            if await keep(self._ground, self.of, head, regroup, fetched):
                self._head = head
                self._host.events.emit("archive_kept", stage=self.of, round=head.round, donors=len(holders))

    async def _on_kept(self, call: Call[AskKept]) -> KeptHead:
        if call.body.stage != self.of:
            return KeptHead()
        async with self._lending:
            if self._lent is None:
                loaded = await trio.to_thread.run_sync(self._store.load_latest)
                self._lent = await trio.to_thread.run_sync(self._lend, loaded) if loaded is not None else KeptHead()
            return self._lent

    def _lend(self, loaded: Loaded) -> KeptHead:
        self.lent.publish(loaded.tree, list(loaded.tensors.values()), loaded.head)
        regroup = None
        with suppress(OSError, msgspec.MsgspecError):
            regroup = msgspec.msgpack.decode(self._home.regroup.read_bytes(), type=Signed)
        return KeptHead(msgspec.msgpack.decode(loaded.head, type=Head), regroup)


async def newest_seen(
    ground: Ground, stage: int, records: Mapping[str, MemberRecord]
) -> tuple[Head, Signed | None, tuple[str, ...]] | None:
    """The head that the group of `stage` stands at, the signature of its term, and who holds its state."""
    manifest, first = ground.manifest, ground.manifest.first_head(stage)
    asked = [peer for peer, record in records.items() if record.role == "stage" and record.stage == stage]
    standings = await ask_standings(ground.host.rpc, asked[:ASKED_MAX], ASK_S, group=first.run_id)
    sightings = weigh(standings, manifest.authority, first)
    if not sightings or not sightings[0].head.members:
        return None
    best = sightings[0]
    return best.head, best.regroup, best.holders


async def keep(ground: Ground, stage: int, head: Head, regroup: Signed | None, state: Fetched) -> bool:
    """Write a fetched state of `stage` to disk, as if we had been a replica of it; whether that went well."""
    manifest, host = ground.manifest, ground.host
    store = open_store(ground.home, manifest, stage, host.identity, host.events)
    await trio.to_thread.run_sync(store.prepare)
    named = dict(zip(vectors_of(manifest, stage), state.tensors, strict=True))
    layout = layout_of(manifest, stage)
    if not await store.save(max(head.round, 0), msgspec.msgpack.encode(head), named, layout):
        return False
    if regroup is not None:
        folder = ground.home.stage(stage, manifest.stages)
        await trio.to_thread.run_sync(write_atomically, folder.regroup, msgspec.msgpack.encode(regroup))
    return True


async def restore(ground: Ground, stage: int, records: Mapping[str, MemberRecord]) -> None:
    """Before a seat is taken at a stage that nobody serves: bring the newest commit that anybody kept of it to our
    disk. Where nobody is reached the peer begins with what it has."""
    manifest, host = ground.manifest, ground.host
    if at_work(stage, records, time.time()) or manifest.stages == 1:
        return
    mine = await trio.to_thread.run_sync(_height_on_disk, ground, stage)
    found: dict[bytes, tuple[KeptHead, list[str]]] = {}

    async def ask(peer: str) -> None:
        with suppress(BarnraiseError):
            kept = (await host.rpc.call(peer, KEPT, AskKept(stage), timeout_s=4 * ASK_S)).body
            if kept.head is not None and _is_signed(ground, stage, kept):
                found.setdefault(kept.head.hash, (kept, []))[1].append(peer)

    keepers = [p for p, r in records.items() if r.role == "stage" and (r.stage + 1) % manifest.stages == stage]
    async with trio.open_nursery() as nursery:
        for peer in keepers[:ASKED_MAX]:
            nursery.start_soon(ask, peer)
    best = max(found.values(), key=lambda entry: entry[0].head.height if entry[0].head else (-1, -1), default=None)
    if best is None or best[0].head is None or best[0].head.height <= mine:
        return
    head, holders = best[0].head, tuple(best[1])
    try:
        fetched = await _fetch(ground, stage, head, holders)
    except BarnraiseError as error:
        host.events.emit("archive_stale", stage=stage, reason=str(error))
        return
    await keep(ground, stage, head, best[0].regroup, fetched)
    host.events.emit("stage_restored", stage=stage, round=head.round, donors=len(holders))


def _is_signed(ground: Ground, stage: int, kept: KeptHead) -> bool:
    """Whether that head is of the group, and of a term that the authority began."""
    assert kept.head is not None
    if kept.regroup is None or kept.head.run_id != ground.manifest.group_id(stage):
        return False
    try:
        return open_regroup(kept.regroup, ground.manifest.authority, kept.head.run_id).term == kept.head.term
    except ProtocolViolation:
        return False


def _height_on_disk(ground: Ground, stage: int) -> tuple[int, int]:
    loaded = open_store(ground.home, ground.manifest, stage, ground.host.identity, ground.host.events).load_latest()
    return msgspec.msgpack.decode(loaded.head, type=Head).height if loaded is not None else (-1, -1)


async def _fetch(ground: Ground, stage: int, head: Head, holders: tuple[str, ...]) -> Fetched:
    """The state of `head`, checked against its hash."""
    folder = ground.home.stage(stage, ground.manifest.stages)
    await trio.to_thread.run_sync(lambda: folder.path.mkdir(parents=True, exist_ok=True))
    return await fetch_state(
        ground.host.rpc,
        lambda: holders,
        head.state_hash,
        state_bytes(ground.manifest, stage),
        folder.path / "archive.part",
        ground.host.events,
        len(vectors_of(ground.manifest, stage)),
    )
