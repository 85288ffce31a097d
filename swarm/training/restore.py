"""Restoring a stage without replicas: from the newest commit of it on this peer's disk or at a backup holder.

A commit counts by its proof, so one honest backup holder (`swarm.training.stage_backup`) is enough. Best is the state
that the authority is at, from which it continues at once, next the highest commit. Backup holders come and go: the peer
asks again for a limited time, while one cannot answer yet or none has the state from which the authority continues.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

import msgspec
import trio

from peer.catalogue.groups import PeerPenalized
from peer.catalogue.stages import StageRestored
from peer.errors import BarnraiseError, ProtocolViolation, RemoteError
from peer.net.rpc_server import BUSY, UNKNOWN_METHOD
from swarm.membership.member_record import MemberRecord, MemberView
from swarm.membership.proven_heads import ProofBook, ProvenHead, ask_proven_heads
from swarm.placement.commits import fetch_commit, save_commit
from swarm.placement.stage_choice import at_work
from swarm.placement.stages import open_store
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.messages import Position
from swarm.protocol.head import Head
from swarm.run.agreement import agreement_config
from swarm.run.peer_context import PeerContext
from swarm.training.checkpoints import proof_of
from swarm.training.stage_backup import HELD_BACKUP, AskBackup, rendezvous_rank

ASK_FOR_S: Final = 20.0
ASK_AGAIN_S: Final = 0.5
HELD_S: Final = 16.0  # a backup holder reads its commit from disk first
AUTHORITY_S: Final = 4.0
ASKED_MAX: Final = 16


async def restore(context: PeerContext, stage: int, known: MemberView) -> None:
    """Bring to this disk the best backup of a stage without replicas.

    Where there is none the peer begins with its own state. Returns at once where the stage has a replica at work.
    """
    if context.manifest.stages == 1:
        return
    until = trio.current_time() + ASK_FOR_S
    mine = await trio.to_thread.run_sync(_on_disk, context, stage)
    proofs = ProofBook(agreement_config(context.manifest, stage, context.host.peer_id))
    failed: set[bytes] = set()
    while not at_work(stage, known(), time.time()) and trio.current_time() < until:
        offers, complete = await _ask_backup_holders(context, stage, known(), proofs, until)
        last = await _ask_authority(context, stage)

        def worth(head: Head, last: Head | None = last) -> tuple[int, Position]:
            if last is not None and position_of(head) > position_of(last):
                proven = proofs.proven.get(head.hash)  # none: it is on this disk
                leads_on = proven is None or proven.leads_from(last)  # else keys of members that left may have made it
                return 2 if leads_on else -1, position_of(head)  # the authority has yet to hear of it
            return int(last is not None and head.state_hash == last.state_hash), position_of(head)

        fit = [offer for offer in offers if offer.head.hash not in failed]
        best = max(fit, key=lambda offer: worth(offer.head), default=None)
        if best is not None and worth(best.head) > worth(mine):
            if await _bring(context, stage, best):
                mine = best.head
            else:
                failed.add(best.head.hash)
        elif complete or last is None or worth(mine)[0]:
            return
        else:
            await trio.sleep(ASK_AGAIN_S)


async def _ask_backup_holders(
    context: PeerContext, stage: int, records: Mapping[str, MemberRecord], proofs: ProofBook, until: float
) -> tuple[list[ProvenHead], bool]:
    """Return what backup holders prove, and say that they hold; and whether one has answered and none is still
    starting."""
    before = (stage - 1) % context.manifest.stages
    able = [peer for peer, record in records.items() if record.role == "stage" and record.stage in (before, -1)]
    asked = sorted(able, key=lambda peer: rendezvous_rank(peer, stage))[:ASKED_MAX]
    holders: dict[bytes, list[str]] = {}
    checking = trio.Lock()
    heard = waiting = False

    async def ask(peer: str) -> None:
        nonlocal heard, waiting
        try:
            held = (await context.host.rpc.call(peer, HELD_BACKUP, AskBackup(stage), timeout_s=HELD_S)).body
        except BarnraiseError as error:
            waiting |= isinstance(error, RemoteError) and error.code in (UNKNOWN_METHOD, BUSY)
            return
        heard = True
        if held.head is None:
            return
        try:
            async with checking:
                await trio.to_thread.run_sync(proofs.add, held.head, held.links)
        except ProtocolViolation as error:
            context.host.events.emit(PeerPenalized(peer=peer, reason=str(error)))
            return
        holders.setdefault(held.head.hash, []).append(peer)

    with trio.move_on_at(until):
        async with trio.open_nursery() as nursery:
            for peer in asked:
                nursery.start_soon(ask, peer)
    offers = [replace(proofs.proven[name], holders=tuple(sorted(peers))) for name, peers in holders.items()]
    return offers, heard and not waiting


async def _ask_authority(context: PeerContext, stage: int) -> Head | None:
    """Return the authority's head, which shows how far the group was; None if it does not answer."""
    manifest = context.manifest
    config = agreement_config(manifest, stage, context.host.peer_id)
    found = await ask_proven_heads(context.host, config, [manifest.authority], AUTHORITY_S)
    return found[0].head if found else None


async def _bring(context: PeerContext, stage: int, offer: ProvenHead) -> bool:
    """Fetch the commit to this disk; return whether that went well."""
    events = context.host.events
    try:
        fetched = await fetch_commit(context, stage, offer)
        if not await save_commit(context, stage, offer, fetched):
            return False
    except BarnraiseError as error:
        events.emit("backup_stale", stage=stage, reason=str(error))
        return False
    events.emit(StageRestored(stage=stage, round=offer.head.round, donors=len(offer.holders)))
    return True


def _on_disk(context: PeerContext, stage: int) -> Head:
    """Return the head that the peer would begin with: the last commit on its disk, or round 0 where it has no proof
    of that commit."""
    manifest, host = context.manifest, context.host
    loaded = open_store(context.home, manifest, stage, host.identity, host.events).load_latest()
    if loaded is not None:
        head = msgspec.msgpack.decode(loaded.head, type=Head)
        if proof_of(context, stage, head) is not None:
            return head
    return manifest.first_head(stage)
