"""The frozen base of a run with an adapter, at a peer that trains."""

from __future__ import annotations

from peer.ipc.span import spans_of
from peer.ipc.train_messages import LoadBase
from swarm.membership.member_record import MemberView
from swarm.parts.base import bring_base
from swarm.parts.part_files import PartStore
from swarm.parts.weights import BaseWeights, parts_of
from swarm.run.peer_context import PeerContext


def base_store(context: PeerContext) -> PartStore | None:
    """Return what serves the base's parts to other peers, empty at first; None where the whole model is trained."""
    weights = BaseWeights.of(context.manifest)
    return None if weights is None else PartStore(weights, context.uploads)


async def trained_beside(
    context: PeerContext, stage: int, store: PartStore | None, known: MemberView
) -> LoadBase | None:
    """Have the parts of the base that a stage needs on this disk, checked, and in `store`. Return where they are, for a
    worker; None where the whole model is trained. Raises ConfigError, NetworkError, ResourceError, CheckpointError."""
    manifest, weights = context.manifest, BaseWeights.of(context.manifest)
    if manifest.base is None or weights is None:
        return None
    held = await bring_base(
        context.host,
        manifest,
        context.home.base,
        context.config.base,
        lambda: (*known(), manifest.authority),
        store,
        parts_of(weights, spans_of(manifest.cuts)[stage]),
    )
    return LoadBase(
        dtype=manifest.base.dtype,
        quantization=manifest.base.quantization,
        folders=tuple(str(path.absolute()) for path in held.folders),
    )
