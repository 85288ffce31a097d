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
from swarm.protocol.leader_bytes import leader_bytes
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
    held = [peers_that_fit(bundles, manifest.stages > 1) for bundles in _bundles(manifest)]
    return min([manifest.run.max_peers, *held])


def leader_most(manifest: Manifest, round_s: float) -> float:
    """Return about how many bytes the leader of a full group sends in a round of that time besides its exchange, at the
    stage where it is most; 0 if the run's peers have no common state, and so no leader."""
    most, pipeline = group_most(manifest), manifest.stages > 1
    return max((leader_bytes(most, bundles, round_s, pipeline) for bundles in _bundles(manifest)), default=0.0)


def _bundles(manifest: Manifest) -> list[int]:
    """Return how many bundles a round's update has at each stage; nothing of a run without rosters."""
    found = []
    for stage in range(manifest.stages if manifest.outer.has_common_state else 0):
        slices = slices_of_update(manifest.outer, manifest.codec, layout_of(manifest, stage), manifest.inner)
        found.append(schedule_of(manifest, stage).bundles(slices).count)
    return found


def open_store(home: Home, manifest: Manifest, stage: int, identity: Identity, events: EventLog) -> CheckpointStore:
    """Open the stage's checkpoints in `home`. Their name has the group's id, so no stage loads another's."""
    folder = home.stage(stage, manifest.stages).checkpoints
    return CheckpointStore(folder, identity, manifest.group_id(stage), events)
