"""Restoring a stage without replicas: from the newest commit of it on this peer's disk or at a backup holder.

Backup holders (`swarm.training.stage_backup`) come and go, and the authority goes on from few commits only: the last
that it saw, later ones, and those that it saw lately. So the peer asks both. It asks again for a limited time, while a
backup holder cannot answer yet or no commit has turned up to go on from.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import trio

from peer.errors import BarnraiseError, ProtocolViolation, RemoteError
from peer.identity import Signed
from peer.net.rpc_server import BUSY, UNKNOWN_METHOD
from swarm.membership.member_record import MemberRecord, MemberView
from swarm.placement.stage_choice import at_work
from swarm.placement.stages import open_store
from swarm.protocol.head import Head
from swarm.protocol.messages import BELIEVED, AskBelieved
from swarm.protocol.quorum import open_regroup
from swarm.run.peer_context import PeerContext
from swarm.training.checkpoints import regroup_of
from swarm.training.stage_backup import HELD_BACKUP, AskBackup, fetch_commit, rendezvous_rank, save_backup

ASK_FOR_S: Final = 20.0
ASK_AGAIN_S: Final = 0.5
HELD_S: Final = 16.0  # a backup holder reads its commit from disk first
BELIEVED_S: Final = 4.0
ASKED_MAX: Final = 16


@dataclass(frozen=True)
class _Offer:
    """A commit at backup holders."""

    head: Head
    regroup: Signed
    """The authority's signature of the head's term."""
    holders: tuple[str, ...]


async def restore(context: PeerContext, stage: int, known: MemberView) -> None:
    """Bring to this disk the newest backup of a stage without replicas that the authority would go on from.

    Where there is none the peer begins with what it has. Returns at once where the stage has a replica at work.
    """
    if context.manifest.stages == 1:
        return
    until = trio.current_time() + ASK_FOR_S
    mine = await trio.to_thread.run_sync(_on_disk, context, stage)
    failed: list[_Offer] = []
    while not at_work(stage, known(), time.time()) and trio.current_time() < until:
        offers, complete = await _ask_backup_holders(context, stage, known(), until)
        believed, last = await _ask_authority(context, stage, [mine, *(offer.head for offer in offers)])
        fit = [offer for offer in offers if offer.head.hash in believed and offer not in failed]
        best = max(fit, key=lambda offer: offer.head.position, default=None)
        if best is not None and (mine.hash not in believed or best.head.position > mine.position):
            if await _bring(context, stage, best):
                mine = best.head
            else:
                failed.append(best)
        elif mine.hash in believed and (complete or mine.position >= last):
            return
        else:
            await trio.sleep(ASK_AGAIN_S)


async def _ask_backup_holders(
    context: PeerContext, stage: int, records: Mapping[str, MemberRecord], until: float
) -> tuple[list[_Offer], bool]:
    """Return what backup holders claim to hold; and whether one has answered and none is still starting."""
    before = (stage - 1) % context.manifest.stages
    able = [peer for peer, record in records.items() if record.role == "stage" and record.stage in (before, -1)]
    asked = sorted(able, key=lambda peer: rendezvous_rank(peer, stage))[:ASKED_MAX]
    found: dict[bytes, _Offer] = {}
    heard = waiting = False

    async def ask(peer: str) -> None:
        nonlocal heard, waiting
        try:
            held = (await context.host.rpc.call(peer, HELD_BACKUP, AskBackup(stage), timeout_s=HELD_S)).body
        except BarnraiseError as error:
            waiting |= isinstance(error, RemoteError) and error.code in (UNKNOWN_METHOD, BUSY)
            return
        heard = True
        if held.head is not None and held.regroup is not None and _is_signed(context, stage, held.head, held.regroup):
            name = held.head.hash
            others = found[name].holders if name in found else ()
            found[name] = _Offer(held.head, held.regroup, tuple(sorted((*others, peer))))

    with trio.move_on_at(until):
        async with trio.open_nursery() as nursery:
            for peer in asked:
                nursery.start_soon(ask, peer)
    return list(found.values()), heard and not waiting


async def _ask_authority(context: PeerContext, stage: int, heads: Sequence[Head]) -> tuple[set[bytes], tuple[int, int]]:
    """Return the hashes of those `heads` that the authority would go on from, and the position of the last head that it
    saw. Where it does not answer, all of them may do."""
    manifest = context.manifest
    question = AskBelieved(manifest.group_id(stage), tuple((head.hash, head.round) for head in heads))
    try:
        answer = await context.host.rpc.call(manifest.authority, BELIEVED, question, timeout_s=BELIEVED_S)
    except BarnraiseError:
        return {head.hash for head in heads}, heads[0].position
    return set(answer.body.heads), answer.body.last


async def _bring(context: PeerContext, stage: int, offer: _Offer) -> bool:
    """Fetch the commit to this disk; return whether that went well."""
    events = context.host.events
    try:
        fetched = await fetch_commit(context, stage, offer.head, offer.holders)
        if not await save_backup(context, stage, offer.head, offer.regroup, fetched):
            return False
    except BarnraiseError as error:
        events.emit("backup_stale", stage=stage, reason=str(error))
        return False
    events.emit("stage_restored", stage=stage, round=offer.head.round, donors=len(offer.holders))
    return True


def _on_disk(context: PeerContext, stage: int) -> Head:
    """Return the head that the peer would begin with: the last commit on its disk, or round 0 where it has no proof
    that the authority began that commit's term."""
    manifest, host = context.manifest, context.host
    loaded = open_store(context.home, manifest, stage, host.identity, host.events).load_latest()
    if loaded is not None:
        head, first = msgspec.msgpack.decode(loaded.head, type=Head), manifest.first_head(stage)
        folder = context.home.stage(stage, manifest.stages)
        if head.run_id == first.run_id and regroup_of(folder, manifest.authority, head) is not None:
            return head
    return manifest.first_head(stage)


def _is_signed(context: PeerContext, stage: int, head: Head, regroup: Signed) -> bool:
    """Whether `head` is of the group, and of the term that the authority began with `regroup`."""
    try:
        begun = open_regroup(regroup, context.manifest.authority, context.manifest.group_id(stage))
    except ProtocolViolation:
        return False
    return head.run_id == begun.run_id and head.term == begun.term
