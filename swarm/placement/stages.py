"""What follows from a run's manifest for each of its stages: vectors, files, costs; and where the stages are cut.

With one stage all of it is about the whole model.
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
    """The flat vector of a stage."""
    return FlatLayout.of(manifest.model, spans_of(manifest.cuts)[stage])


def vectors_of(manifest: Manifest, stage: int = 0) -> tuple[str, ...]:
    """What makes up the shared state of a stage's group: "theta" and what else its method keeps, vectors of one
    length."""
    layout = layout_of(manifest, stage)
    return ("theta", *shared_vectors(manifest.outer, manifest.codec, layout, manifest.inner))


def state_bytes(manifest: Manifest, stage: int = 0) -> int:
    """The size of that state."""
    return len(vectors_of(manifest, stage)) * BYTES_A_VALUE * layout_of(manifest, stage).numel


def open_store(home: Home, manifest: Manifest, stage: int, identity: Identity, events: EventLog) -> CheckpointStore:
    """Where `home` keeps that stage's checkpoints. They are named after its group, so that no stage loads another's."""
    folder = home.stage(stage, manifest.stages).checkpoints
    return CheckpointStore(folder, identity, manifest.group_id(stage), events)


def cut(
    stages: int, model: ModelConfig, outer: OuterConfig, codec: CodecConfig, inner: InnerConfig, seq_len: int
) -> tuple[tuple[int, int], ...]:
    """The blocks of each stage, (first, past the last), so that the slowest is as fast as it can be; of such cuts one
    whose largest stage needs the least memory. Only between groups of blocks that share parameters."""
    whole = FlatLayout.of(model)
    copies = WORKER_VECTORS + COPIES * (1 + len(shared_vectors(outer, codec, whole, inner)))
    costs = _PartCosts(model, seq_len, BYTES_A_VALUE * copies)
    shared = model.shared_blocks
    groups = split_layers([costs.group()] * (model.layers // shared), stages, costs.embedding(), costs.head())
    return tuple((first * shared, end * shared) for first, end in groups)


def stage_costs(manifest: Manifest) -> tuple[StageCost, ...]:
    """What each stage costs a replica: work in FLOPs a micro-batch, forward and backward; the bytes of the state that a
    newcomer downloads; the bytes of memory that it needs, activations not counted."""
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
    """Compute of the model's parts in FLOPs of a forward pass, a token; memory at so many bytes a parameter."""

    def __init__(self, model: ModelConfig, seq_len: int, bytes_a_parameter: float) -> None:
        self._model, self._bytes = model, bytes_a_parameter
        # Queries against half of the keys (the mask), then the same with the values.
        self._attention = 2.0 * seq_len * model.heads * model.head_size

    def group(self) -> PartCost:
        """Blocks that share their parameters; one block, where they do not."""
        matrices = norms = 0
        span = Span(0, self._model.shared_blocks, self._model.layers)
        for name, slot in FlatLayout.of(self._model, span).slots.items():
            if name.startswith("model.layers."):
                matrices += slot.numel * (len(slot.shape) == 2)
                norms += slot.numel * (len(slot.shape) == 1)
        compute = self._model.shared_blocks * (2.0 * matrices + self._attention)
        return PartCost(compute, self._bytes * (matrices + norms))

    def embedding(self) -> PartCost:
        """Looking up costs nothing to speak of."""
        return PartCost(0.0, self._bytes * self._model.vocab_size * self._model.hidden_size)

    def head(self) -> PartCost:
        values = self._model.vocab_size * self._model.hidden_size
        return PartCost(2.0 * values, self._bytes * (0 if self._model.tie_embeddings else values))
