"""Costs of a run for a machine: the cuts of its model, the cost of a stage, and a peer's footprint. Without torch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Final

from optim.config import AllReduceConfig, CodecConfig, OuterConfig
from optim.wire_sizes import exchange_of
from peer.config import DataConfig, InnerConfig, MasterType, ModelConfig, StorageConfig
from peer.errors import ConfigError
from peer.footprint.host import footprint
from peer.footprint.layout import Layout
from peer.footprint.parameters import parameter_shapes
from peer.footprint.work import part_work, training_work
from peer.footprint.workload import DeviceKind, Footprint, Workload
from swarm.placement.load import StageCost
from swarm.run.manifest import Manifest
from swarm.run.sections import PipelineConfig, micro_batch_of

USUAL_PEERS: Final = 8
"""Of a stage's group: all peers of a run must find the same costs, however many there are."""
STATE_SHARE: Final = 0.8
"""Of a machine's memory: where a peer would take more of it, its states lie in files by default."""


@dataclass(frozen=True)
class PartCost:
    """The cost of a block, the embedding or the head: `compute` in any unit (FLOPs, seconds), `memory_bytes` at a
    peer."""

    compute: float
    memory_bytes: float = 0.0


NOTHING: Final = PartCost(0.0)


def split_layers(
    blocks: Sequence[PartCost],
    stages: int,
    embedding: PartCost = NOTHING,
    head: PartCost = NOTHING,
    memory_max_bytes: float = math.inf,
) -> tuple[tuple[int, int], ...]:
    """Return the blocks of each stage as (first, end), at least one a stage.

    The slowest stage is as fast as possible with no stage over `memory_max_bytes`; of all such splits, the largest
    stage needs the least memory. Exact, O(stages * blocks^2). Raises ConfigError if there is no such split.
    """
    if not 1 <= stages <= len(blocks):
        raise ConfigError(f"{len(blocks)} blocks cannot make {stages} stages: choose 1 to {len(blocks)}")
    compute = _running([block.compute for block in blocks])
    memory = _running([block.memory_bytes for block in blocks])

    def compute_of(first: int, last: int) -> float:
        return compute[last] - compute[first] + _ends(first, last, embedding.compute, head.compute)

    def memory_of(first: int, last: int) -> float:
        return memory[last] - memory[first] + _ends(first, last, embedding.memory_bytes, head.memory_bytes)

    def _ends(first: int, last: int, before: float, after: float) -> float:
        return (before if first == 0 else 0.0) + (after if last == len(blocks) else 0.0)

    fits = _minimax(len(blocks), stages, compute_of, lambda a, b: memory_of(a, b) <= memory_max_bytes)
    if fits is None:
        lightest = _minimax(len(blocks), stages, memory_of, lambda a, b: True)
        assert lightest is not None  # nothing is forbidden
        raise ConfigError(
            f"no split into {stages} stages fits into {memory_max_bytes / 2**30:.2f} GiB a stage: allow "
            f"{lightest[0] / 2**30:.2f} GiB or choose more stages"
        )
    slowest = fits[0]
    lightest = _minimax(len(blocks), stages, memory_of, lambda a, b: compute_of(a, b) <= slowest)
    assert lightest is not None  # `fits` is one
    return lightest[1]


def _running(values: Sequence[float]) -> list[float]:
    return [math.fsum(values[:count]) for count in range(len(values) + 1)]


def _minimax(
    blocks: int, stages: int, cost: Callable[[int, int], float], allowed: Callable[[int, int], bool]
) -> tuple[float, tuple[tuple[int, int], ...]] | None:
    """Return the split with the least largest `cost` of all whose every stage is `allowed`: (that cost, the stages)."""
    # best[n]: the first n blocks in the stages so far -> (largest cost, where the last stage begins)
    best: list[list[tuple[float, int]]] = [[(0.0, 0)] + [(math.inf, -1)] * blocks]
    for stage in range(1, stages + 1):
        row = [(math.inf, -1)] * (blocks + 1)
        for last in range(stage, blocks - (stages - stage) + 1):
            for first in range(stage - 1, last):
                before = best[-1][first][0]
                if before < math.inf and allowed(first, last):
                    row[last] = min(row[last], (max(before, cost(first, last)), first))
        best.append(row)
    if best[stages][blocks][0] == math.inf:
        return None
    bounds = [blocks]
    for stage in range(stages, 0, -1):
        bounds.append(best[stage][bounds[-1]][1])
    bounds.reverse()
    return best[stages][blocks][0], tuple(pairwise(bounds))


@dataclass(frozen=True)
class RunShape:
    """The rules of a run that footprint and pace depend on: those of a manifest, or of a RUN.toml before it has one."""

    model: ModelConfig
    data: DataConfig
    inner: InnerConfig
    outer: OuterConfig
    codec: CodecConfig
    pipeline: PipelineConfig
    cuts: tuple[tuple[int, int], ...]
    base: StorageConfig | None = None
    """Of a model with an adapter: the form of its frozen weights."""

    @classmethod
    def of(cls, manifest: Manifest) -> RunShape:
        """Return the rules of a manifest."""
        m = manifest
        return cls(m.model, m.data, m.inner, m.outer, m.codec, m.pipeline, m.cuts, m.base)

    def workload(
        self,
        stage: int,
        peers: int,
        device: DeviceKind = "cpu",
        narrow: bool = False,
        weights: MasterType = "fp32",
    ) -> Workload:
        """Return the part of one peer in a stage whose group has that many `peers`."""
        blocks, staged = range(*self.cuts[stage]), len(self.cuts) > 1
        return Workload(
            model=self.model,
            inner=self.inner,
            exchange=exchange_of(self.outer, self.codec, parameter_shapes(self.model, blocks), peers),
            blocks=blocks,
            seq_len=self.data.seq_len,
            sequences=micro_batch_of(self.pipeline, self.inner) if staged else self.inner.batch_size,
            is_stage=staged,
            is_synchronous=staged and isinstance(self.outer, AllReduceConfig),
            device=device,
            narrow=narrow,
            base=self.base,
            weights=weights,
        )

    def placed(self, work: Workload, memory_bytes: float) -> Workload:
        """Return that work with the states in files, where they and all else of this peer would take more than
        `STATE_SHARE` of `memory_bytes`, on a machine without a GPU with what a step takes."""
        too_large = self.footprint(work).host_bytes > STATE_SHARE * memory_bytes
        return replace(work, state_on_disk=too_large and work.exchange.is_common)

    def footprint(self, work: Workload, token_cache_bytes: float = 0.0) -> Footprint:
        """Return the bytes of a peer that does that work. `token_cache_bytes`: of a peer that reads text."""
        if len(self.cuts) == 1:
            return footprint(work, token_cache_bytes)
        stage = [range(*blocks) for blocks in self.cuts].index(work.blocks)
        backed_up = self.workload((stage + 1) % len(self.cuts), work.exchange.peers)
        return footprint(work, token_cache_bytes * (stage == 0), backed_up.state_bytes)


def of_each(work: Workload, layout: Layout) -> Workload:
    """Return what each device of a layout does of that work: of a stage's micro-batch its rows."""
    rows = -(-work.sequences // layout.batches) if work.is_stage else work.sequences
    return replace(work, layout=layout, sequences=rows)


def cut(stages: int, model: ModelConfig, seq_len: int) -> tuple[tuple[int, int], ...]:
    """Return the blocks of each stage as (first, end), cut between groups of blocks that share parameters. The slowest
    stage is as fast as possible; of all such cuts, the largest stage has the fewest parameters."""
    parts, shared = part_work(model, seq_len), model.shared_blocks
    group = PartCost(parts.group, parts.group_parameters)
    embedding, head = PartCost(0.0, parts.embedding_parameters), PartCost(parts.head, parts.head_parameters)
    groups = split_layers([group] * (model.layers // shared), stages, embedding, head)
    return tuple((first * shared, end * shared) for first, end in groups)


def stage_costs(manifest: Manifest) -> tuple[StageCost, ...]:
    """Return the cost of each stage: work in FLOPs for forward and backward of a micro-batch, bytes of state to
    download, and bytes of memory on a machine without a GPU, with states in files."""
    shape, found = RunShape.of(manifest), []
    seq_len, recompute = manifest.data.seq_len, manifest.pipeline.recompute
    for stage in range(manifest.stages):
        work = shape.workload(stage, USUAL_PEERS)
        flops = work.tokens * training_work(manifest.model, work.blocks, seq_len, recompute)
        memory = shape.footprint(replace(work, state_on_disk=work.exchange.is_common)).host_bytes
        found.append(StageCost(flops, work.state_bytes, memory, needs_text=stage == 0))
    return tuple(found)
