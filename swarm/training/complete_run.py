"""A peer that joins a complete run: it learns so at once, and gets the last state if it can hold the model.

The coordinator says so by the proof of each stage's last commit, and serves their states. Of a pipeline a peer takes
none: it could not say which stage its user wants, and `peer export INVITE` fetches them all. Of a gossip run there is
no common state.
"""

from __future__ import annotations

import msgspec
import trio

from peer.catalogue.rounds import RunFoundComplete
from peer.errors import NetworkError, ResourceError
from peer.notifier import ask_at_once
from swarm.membership.completion import COMPLETE
from swarm.membership.member_record import MEMBERS
from swarm.membership.membership import read_records
from swarm.membership.proven_heads import ProvenHead, ask_proven_heads
from swarm.placement.commits import fetch_commit, save_commit
from swarm.placement.stages import open_store
from swarm.protocol.head import Head
from swarm.run.agreement import agreement_config
from swarm.run.peer_context import PeerContext


async def comes_too_late(context: PeerContext) -> bool:
    """Return whether the run is complete and its last state kept, so that nothing is left to do for this peer. The
    last state of a whole model is then in its home. Events: run_found_complete, also where the last state is not kept.

    Raises NetworkError if the coordinator stops in the middle of a fetch, ResourceError if the disk does not take it.
    """
    manifest = context.manifest
    rounds, stages = manifest.run.rounds, manifest.stages
    if not rounds:
        return False
    if not manifest.outer.has_common_state:
        return await _is_gossip_over(context)
    heads = await _last_heads(context)
    if any(proven is None or proven.head.round < rounds for proven in heads):
        return False
    kept = all(proven is not None and manifest.authority in proven.holders for proven in heads)
    context.host.events.emit(RunFoundComplete(round=rounds, kept=kept, stages=stages, common=True))
    if kept and stages == 1 and heads[0] is not None and context.config.role != "feeder":
        await _bring(context, heads[0])
    return kept


async def _is_gossip_over(context: PeerContext) -> bool:
    """Return whether the coordinator says that all peers have made their last round: no common state was made."""
    manifest, host = context.manifest, context.host
    try:
        records = await read_records(context.node, host, MEMBERS, manifest.run_id)
    except NetworkError:
        return False
    authority = records.get(manifest.authority)
    if authority is None or authority.phase != COMPLETE:
        return False
    host.events.emit(RunFoundComplete(round=manifest.run.rounds, kept=True, stages=1, common=False))
    return True


async def _last_heads(context: PeerContext) -> list[ProvenHead | None]:
    """Return the head of each stage's group that the coordinator proves; None where it does not answer."""
    manifest, host = context.manifest, context.host

    async def ask(stage: int) -> ProvenHead | None:
        config = agreement_config(manifest, stage, host.peer_id)
        return next(iter(await ask_proven_heads(host, config, [manifest.authority])), None)

    return await ask_at_once(ask, range(manifest.stages))


async def _bring(context: PeerContext, last: ProvenHead) -> None:
    """Fetch the state of the last commit of the whole model, unless this home has it."""
    manifest, host = context.manifest, context.host
    store = open_store(context.home, manifest, 0, host.identity, host.events)
    saved = await trio.to_thread.run_sync(store.load_latest)
    if saved is not None and msgspec.msgpack.decode(saved.head, type=Head).state_hash == last.head.state_hash:
        return
    fetched = await fetch_commit(context, 0, last)
    if not await save_commit(context, 0, last, fetched):
        raise ResourceError(f"the last state could not be saved under {context.home.path}: free some space")
