"""The stages of a run, as its manifest fixes them: cuts, vectors, files and costs. A run of one stage has the whole
model in it.
"""

from __future__ import annotations

from typing import Final

from optim.config import CodecConfig, OuterConfig
from optim.strategies.registry import shared_vectors
from peer.checkpoint.store import CheckpointStore
from peer.config import InnerConfig, ModelConfig
from peer.events import EventLog
from peer.identity import Identity
from peer.ipc.span import Span, spans_of
from peer.model.layout import FlatLayout
from swarm.placement.load import StageCost
from swarm.placement.partition import PartCost, split_layers
from swarm.run.home import Home
from swarm.run.manifest import Manifest

BYTES_A_VALUE: Final = 4
WORKER_VECTORS: Final = 6  # weights, outer weights, delta, gradient, two moments
COPIES: Final = 4  # of the outer state: current, next, and two snapshots for joiners
GRADIENT_WORK: Final = 2.0  # of the forward pass's


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
    return len(vectors_of(manifest, stage)) * BYTES_A_VALUE * layout_of(manifest, stage).numel


def open_store(home: Home, manifest: Manifest, stage: int, identity: Identity, events: EventLog) -> CheckpointStore:
    """Open the stage's checkpoints in `home`. Their name has the group's id, so no stage loads another's."""
    folder = home.stage(stage, manifest.stages).checkpoints
    return CheckpointStore(folder, identity, manifest.group_id(stage), events)


def cut(
    stages: int, model: ModelConfig, outer: OuterConfig, codec: CodecConfig, inner: InnerConfig, seq_len: int
) -> tuple[tuple[int, int], ...]:
    """Return the blocks of each stage as (first, end), cut between groups of blocks that share parameters. The slowest
    stage is as fast as possible; of all such cuts, the largest stage needs the least memory."""
    whole = FlatLayout.of(model)
    copies = WORKER_VECTORS + COPIES * (1 + len(shared_vectors(outer, codec, whole, inner)))
    costs = _PartCosts(model, seq_len, BYTES_A_VALUE * copies)
    shared = model.shared_blocks
    groups = split_layers([costs.group()] * (model.layers // shared), stages, costs.embedding(), costs.head())
    return tuple((first * shared, end * shared) for first, end in groups)


def stage_costs(manifest: Manifest) -> tuple[StageCost, ...]:
    """Return the cost of each stage: work in FLOPs for forward and backward of a micro-batch, bytes of state to
    download, and bytes of memory without activations."""
    model, seq_len = manifest.model, manifest.data.seq_len
    passes = 1 + GRADIENT_WORK + manifest.pipeline.recompute
    tokens = manifest.micro_batch * seq_len
    found = []
    for stage, (first, end) in enumerate(manifest.cuts):
        vector_bytes = BYTES_A_VALUE * layout_of(manifest, stage).numel
        copies = WORKER_VECTORS + COPIES * len(vectors_of(manifest, stage))
        costs = _PartCosts(model, seq_len, BYTES_A_VALUE * copies)
        parts = [costs.group()] * ((end - first) // model.shared_blocks)
        parts += [costs.embedding()] * (first == 0) + [costs.head()] * (end == model.layers)
        work = passes * tokens * sum(part.compute for part in parts)
        found.append(StageCost(work, state_bytes(manifest, stage), copies * vector_bytes, needs_text=stage == 0))
    return tuple(found)


class _PartCosts:
    """The costs of the model's parts: FLOPs of a forward pass for a token, memory at `bytes_a_parameter`."""

    def __init__(self, model: ModelConfig, seq_len: int, bytes_a_parameter: float) -> None:
        self._model, self._bytes = model, bytes_a_parameter
        # Queries against half of the keys (the mask), then the same with the values.
        self._attention = 2.0 * seq_len * model.heads * model.head_size

    def group(self) -> PartCost:
        """Return the cost of a group of blocks that share their parameters; of one block where they do not."""
        matrices = norms = 0
        span = Span(0, self._model.shared_blocks, self._model.layers)
        for name, slot in FlatLayout.of(self._model, span).slots.items():
            if name.startswith("model.layers."):
                matrices += slot.numel * (len(slot.shape) == 2)
                norms += slot.numel * (len(slot.shape) == 1)
        compute = self._model.shared_blocks * (2.0 * matrices + self._attention)
        return PartCost(compute, self._bytes * (matrices + norms))

    def embedding(self) -> PartCost:
        """Return the cost of the embedding: memory only, a lookup takes no time."""
        return PartCost(0.0, self._bytes * self._model.vocab_size * self._model.hidden_size)

    def head(self) -> PartCost:
        """Return the cost of the output head."""
        values = self._model.vocab_size * self._model.hidden_size
        return PartCost(2.0 * values, self._bytes * (0 if self._model.tie_embeddings else values))
