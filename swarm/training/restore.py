"""Taking a stage that nobody serves: with the newest commit of it that is on our own disk or at a keeper's.

Keepers (`swarm.training.stage_backup`) come and go like everybody, and the authority goes on from few commits only:
the last that it saw, later ones, and those that it saw lately. So whoever takes the stage asks both, and asks again
while somebody who is there cannot say yet what it keeps, or while nothing has turned up to go on from; but not for
long.
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
from swarm.membership.membership import MemberRecord, MemberView
from swarm.placement.stage_choice import at_work
from swarm.placement.stages import open_store
from swarm.protocol.head import Head
from swarm.protocol.messages import BELIEVED, AskBelieved
from swarm.protocol.quorum import open_regroup
from swarm.training.checkpoints import regroup_of
from swarm.training.context import PeerContext
from swarm.training.stage_backup import HELD_BACKUP, AskBackup, fetch_commit, keep, lot

ASK_FOR_S: Final = 20.0
ASK_AGAIN_S: Final = 0.5
KEPT_S: Final = 16.0  # a keeper reads its commit from disk first
BELIEVED_S: Final = 4.0
ASKED_MAX: Final = 16


@dataclass(frozen=True)
class _Offer:
    """A commit, the authority's signature of its term, and who keeps it."""

    head: Head
    regroup: Signed
    holders: tuple[str, ...]


async def restore(context: PeerContext, stage: int, known: MemberView) -> None:
    """Before a seat is taken at a stage that nobody serves: bring the newest commit that anybody keeps of it, and that
    the authority would go on from, to our disk. Where there is none the peer begins with what it has."""
    if context.manifest.stages == 1:
        return
    until = trio.current_time() + ASK_FOR_S
    mine = await trio.to_thread.run_sync(_on_disk, context, stage)
    vain: list[_Offer] = []
    while not at_work(stage, known(), time.time()) and trio.current_time() < until:
        offers, complete = await _ask_backup_holders(context, stage, known(), until)
        believed, last = await _ask_authority(context, stage, [mine, *(offer.head for offer in offers)])
        fit = [offer for offer in offers if offer.head.hash in believed and offer not in vain]
        best = max(fit, key=lambda offer: offer.head.position, default=None)
        if best is not None and (mine.hash not in believed or best.head.position > mine.position):
            if await _bring(context, stage, best):
                mine = best.head
            else:
                vain.append(best)
        elif mine.hash in believed and (complete or mine.position >= last):
            return
        else:
            await trio.sleep(ASK_AGAIN_S)


async def _ask_backup_holders(
    context: PeerContext, stage: int, records: Mapping[str, MemberRecord], until: float
) -> tuple[list[_Offer], bool]:
    """What they claim to keep; and whether somebody has answered, and nobody has yet to take the seat from which it
    will tell."""
    before = (stage - 1) % context.manifest.stages
    able = [peer for peer, record in records.items() if record.role == "stage" and record.stage in (before, -1)]
    asked = sorted(able, key=lambda peer: lot(peer, stage))[:ASKED_MAX]
    found: dict[bytes, _Offer] = {}
    heard = waiting = False

    async def ask(peer: str) -> None:
        nonlocal heard, waiting
        try:
            kept = (await context.host.rpc.call(peer, HELD_BACKUP, AskBackup(stage), timeout_s=KEPT_S)).body
        except BarnraiseError as error:
            waiting |= isinstance(error, RemoteError) and error.code in (UNKNOWN_METHOD, BUSY)
            return
        heard = True
        if kept.head is not None and kept.regroup is not None and _is_signed(context, stage, kept.head, kept.regroup):
            name = kept.head.hash
            others = found[name].holders if name in found else ()
            found[name] = _Offer(kept.head, kept.regroup, tuple(sorted((*others, peer))))

    with trio.move_on_at(until):
        async with trio.open_nursery() as nursery:
            for peer in asked:
                nursery.start_soon(ask, peer)
    return list(found.values()), heard and not waiting


async def _ask_authority(context: PeerContext, stage: int, heads: Sequence[Head]) -> tuple[set[bytes], tuple[int, int]]:
    """Of these heads those that it would go on from, by their hashes, and the height of the last that it saw. Where it
    does not answer any of them may do."""
    manifest = context.manifest
    question = AskBelieved(manifest.group_id(stage), tuple((head.hash, head.round) for head in heads))
    try:
        answer = await context.host.rpc.call(manifest.authority, BELIEVED, question, timeout_s=BELIEVED_S)
    except BarnraiseError:
        return {head.hash for head in heads}, heads[0].position
    return set(answer.body.heads), answer.body.last


async def _bring(context: PeerContext, stage: int, offer: _Offer) -> bool:
    """Fetch it to our disk; whether that went well."""
    events = context.host.events
    try:
        fetched = await fetch_commit(context, stage, offer.head, offer.holders)
        if not await keep(context, stage, offer.head, offer.regroup, fetched):
            return False
    except BarnraiseError as error:
        events.emit("backup_stale", stage=stage, reason=str(error))
        return False
    events.emit("stage_restored", stage=stage, round=offer.head.round, donors=len(offer.holders))
    return True


def _on_disk(context: PeerContext, stage: int) -> Head:
    """What the peer would begin with: the last commit on its disk or, where it could not show that the authority began
    its term, round 0."""
    manifest, host = context.manifest, context.host
    loaded = open_store(context.home, manifest, stage, host.identity, host.events).load_latest()
    if loaded is not None:
        head, first = msgspec.msgpack.decode(loaded.head, type=Head), manifest.first_head(stage)
        folder = context.home.stage(stage, manifest.stages)
        if head.run_id == first.run_id and regroup_of(folder, manifest.authority, head) is not None:
            return head
    return manifest.first_head(stage)


def _is_signed(context: PeerContext, stage: int, head: Head, regroup: Signed) -> bool:
    """Whether that head is of the group, and of the term that the authority began with `regroup`."""
    try:
        begun = open_regroup(regroup, context.manifest.authority, context.manifest.group_id(stage))
    except ProtocolViolation:
        return False
    return head.run_id == begun.run_id and head.term == begun.term
