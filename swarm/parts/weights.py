"""The parts that a served model's weights are cut into, and their sizes. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from peer.config import HiddenType, ModelConfig, Quantization
from peer.footprint.parameters import base_of
from peer.footprint.stored import stored_bytes
from peer.ipc.span import Span
from swarm.run.manifest import BlockRange, Manifest


class Weights(Protocol):
    """The weights of a model, in parts: a `ServedModelManifest`, or what follows a run."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def dtype(self) -> HiddenType: ...

    @property
    def quantization(self) -> Quantization | None:
        """Of the matrices inside of the blocks; None: they are in `dtype`."""

    @property
    def cuts(self) -> tuple[BlockRange, ...]:
        """The blocks of each part."""


class HashedWeights(Weights, Protocol):
    """The same with the hash of each part, as a manifest has them."""

    @property
    def checkpoint(self) -> tuple[bytes, ...]:
        """The state hash of each part (`peer.checkpoint.hash_tree`)."""


def part_spans(weights: Weights) -> list[Span]:
    """Return the blocks of each part."""
    return [Span(first, end, weights.model.layers) for first, end in weights.cuts]


def parts_of(weights: Weights, span: Span) -> list[int]:
    """Return the numbers of the parts that a span needs; for a head that is the embedding also the first one."""
    tied = span.is_last and weights.model.tie_embeddings
    return [
        number
        for number, (first, end) in enumerate(weights.cuts)
        if (first < span.end and span.first < end) or (tied and number == 0)
    ]


def part_bytes(weights: Weights, span: Span) -> int:
    """Return the size of the weights of a span."""
    return stored_bytes(weights.model, span.blocks, weights.dtype, weights.quantization)


@dataclass(frozen=True)
class BaseWeights:
    """The frozen base of a run with an adapter, as its manifest names it: `HashedWeights`."""

    model: ModelConfig
    dtype: HiddenType
    quantization: Quantization | None
    cuts: tuple[BlockRange, ...]
    checkpoint: tuple[bytes, ...]

    @classmethod
    def of(cls, manifest: Manifest) -> BaseWeights | None:
        """Return the base of a run; None where the whole model is trained."""
        base = manifest.base
        if base is None:
            return None
        return cls(base_of(manifest.model), base.dtype, base.quantization, base.cuts, base.checkpoint)


@dataclass(frozen=True)
class AdapterWeights:
    """An adapter of a served model, as one part: `HashedWeights`."""

    model: ModelConfig
    """With that adapter."""
    checkpoint: tuple[bytes, ...]
    dtype: HiddenType = "fp32"
    quantization: Quantization | None = None

    @property
    def cuts(self) -> tuple[BlockRange, ...]:
        return ((0, self.model.layers),)


@dataclass(frozen=True)
class EvenWeights:
    """Weights with a part for each block, or for blocks that share their parameters."""

    model: ModelConfig
    dtype: HiddenType
    quantization: Quantization | None = None

    @property
    def cuts(self) -> tuple[BlockRange, ...]:
        step = self.model.shared_blocks
        return tuple((first, first + step) for first in range(0, self.model.layers, step))
