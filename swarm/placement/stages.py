"""The stages of a run, as its manifest fixes them: vectors and files. A run of one stage has the whole model in it."""

from __future__ import annotations

from optim.strategies.registry import shared_vectors
from peer.checkpoint.store import CheckpointStore
from peer.events import EventLog
from peer.footprint.workload import FLOAT_BYTES
from peer.identity import Identity
from peer.ipc.span import spans_of
from peer.model.layout import FlatLayout
from swarm.run.home import Home
from swarm.run.manifest import Manifest


def layout_of(manifest: Manifest, stage: int = 0) -> FlatLayout:
    """Return the layout of a stage's flat vector."""
    return FlatLayout.of(manifest.model, spans_of(manifest.cuts)[stage])


def vectors_of(manifest: Manifest, stage: int = 0) -> tuple[str, ...]:
    """Return the names of the vectors of the group's shared state, all of one length: "theta" and those of its
    method."""
    layout = layout_of(manifest, stage)
    return ("theta", *shared_vectors(manifest.outer, manifest.codec, layout, manifest.inner))


def state_bytes(manifest: Manifest, stage: int = 0) -> int:
    """Return the size of the group's shared state."""
    return len(vectors_of(manifest, stage)) * FLOAT_BYTES * layout_of(manifest, stage).numel


def open_store(home: Home, manifest: Manifest, stage: int, identity: Identity, events: EventLog) -> CheckpointStore:
    """Open the stage's checkpoints in `home`. Their name has the group's id, so no stage loads another's."""
    folder = home.stage(stage, manifest.stages).checkpoints
    return CheckpointStore(folder, identity, manifest.group_id(stage), events)
