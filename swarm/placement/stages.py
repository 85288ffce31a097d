"""The stages of a run, as its manifest fixes them: vectors and files. A run of one stage has the whole model in it."""

from __future__ import annotations

from optim.config import CodecConfig, OuterConfig, StreamingConfig
from optim.schedule import RoundInfo
from optim.strategies.registry import build_strategy, shared_vectors
from peer.checkpoint.store import CheckpointStore
from peer.config import InnerConfig
from peer.events import EventLog
from peer.footprint.workload import FLOAT_BYTES
from peer.identity import Identity
from peer.ipc.span import spans_of
from peer.model.layout import FlatLayout
from swarm.protocol.roster_room import peers_that_fit
from swarm.run.agreement import schedule_of
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


def slices_of_update(method: OuterConfig, codec: CodecConfig, layout: FlatLayout, inner: InnerConfig) -> int:
    """Return the most slices that a round's update has."""
    strategy = build_strategy(method, codec, layout, inner)
    rounds = method.fragments if isinstance(method, StreamingConfig) else 1
    return max(strategy.slices(RoundInfo(number + 1, 0, inner.lr)) for number in range(rounds))


def group_most(manifest: Manifest) -> int:
    """Return how many peers each of the run's groups may have: `max_peers`, or what a roster holds if that is less."""
    if not manifest.outer.has_common_state:
        return manifest.run.max_peers
    held = []
    for stage in range(manifest.stages):
        slices = slices_of_update(manifest.outer, manifest.codec, layout_of(manifest, stage), manifest.inner)
        bundles = schedule_of(manifest, stage).bundles(slices)
        held.append(peers_that_fit(bundles.count, manifest.stages > 1))
    return min(manifest.run.max_peers, *held)


def open_store(home: Home, manifest: Manifest, stage: int, identity: Identity, events: EventLog) -> CheckpointStore:
    """Open the stage's checkpoints in `home`. Their name has the group's id, so no stage loads another's."""
    folder = home.stage(stage, manifest.stages).checkpoints
    return CheckpointStore(folder, identity, manifest.group_id(stage), events)
