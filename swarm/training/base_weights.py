"""The frozen base of a run with an adapter, at a peer that trains."""

from __future__ import annotations

from peer.ipc.train_messages import LoadBase
from swarm.membership.member_record import MemberView
from swarm.parts.base import bring_base
from swarm.parts.part_files import PartStore
from swarm.parts.weights import BaseWeights
from swarm.run.peer_context import PeerContext


def base_store(context: PeerContext) -> PartStore | None:
    """Return what serves the base's parts to other peers, empty at first; None where the whole model is trained."""
    weights = BaseWeights.of(context.manifest)
    return None if weights is None else PartStore(weights, context.uploads)


async def trained_beside(context: PeerContext, store: PartStore | None, known: MemberView) -> LoadBase | None:
    """Have all parts of the base on this disk, checked, and in `store`. Return where they are, for a worker; None where
    the whole model is trained. Raises ConfigError, NetworkError, ResourceError, CheckpointError."""
    manifest = context.manifest
    if manifest.base is None:
        return None
    own = context.config.base
    held = await bring_base(
        context.host, manifest, context.home.base, own, lambda: (*known(), manifest.authority), store
    )
    return LoadBase(
        dtype=manifest.base.dtype,
        quantization=manifest.base.quantization,
        folders=tuple(str(path.absolute()) for path in held.folders),
    )
