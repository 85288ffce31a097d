"""The inner optimizers of all ranks of a layout against the one of a device that has the whole model."""

from __future__ import annotations

import pytest
import torch

from peer.compute.build_optimizer import build_inner
from peer.compute.optimizer import InnerSpec
from peer.compute.rank_optimizer import RankOptimizer
from peer.config import ModelConfig
from peer.errors import ConfigError
from peer.footprint.layout import Layout
from peer.footprint.optimizer_state import saved_bytes
from peer.parallel.pieces import LocalPieces
from peer.parallel.ranks import Ranks
from tests.optim.support.layouts import layout_of

WHOLE = layout_of(
    {
        "rows": torch.zeros(7, 512),  # of seven rows, two ranks have four and three
        "columns": torch.zeros(16, 1024),
        "vector": torch.zeros(6144),  # coded, too
        "gain": torch.zeros(50),  # small: fp32 moments, of parts as well
        "narrow": torch.zeros(3, 40),
    }
)
TENSOR_DIMS = {"rows": 0, "columns": 1, "vector": 0, "gain": None, "narrow": 1}
LAYOUTS = (Layout(shard=2), Layout(tensor=2), Layout(shard=2, tensor=2), Layout(shard=2, replicate=2), Layout(shard=3))


def rank_optimizer(spec: InnerSpec, layout: Layout, rank: int) -> tuple[RankOptimizer, LocalPieces]:
    """Build that of one rank."""
    pieces = LocalPieces.of(WHOLE, TENSOR_DIMS, layout, rank)
    ranks = Ranks(layout, rank, torch.device("cpu"))
    return RankOptimizer(spec, WHOLE, pieces, ranks, torch.zeros(pieces.layout.numel)), pieces


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("optimizer", ["adamw8bit", "lion"])
def test_a_step_of_all_ranks_is_that_of_one_device_to_the_bit(optimizer: str, layout: Layout) -> None:
    """With `adamw8bit` because no rank's piece begins or ends within the values that share a scale."""
    spec = InnerSpec(optimizer, lr=1e-2, decay="matrices")  # type: ignore[arg-type]
    random = torch.Generator().manual_seed(5)
    weights, one, two = (torch.randn(WHOLE.numel, generator=random) for _ in range(3))
    alone = build_inner(spec, WHOLE, weights)
    before, after = (torch.zeros(saved_bytes(optimizer, WHOLE.shapes), dtype=torch.uint8) for _ in range(2))
    moved = weights.clone()
    alone.step(moved, one)
    alone.save(before)
    alone.step(moved, two)
    alone.save(after)

    start = weights.clone()
    build_inner(spec, WHOLE, start).step(start, one)
    saved, exported = torch.full_like(after, 255), torch.full_like(weights, torch.nan)
    for rank in range(layout.size):
        mine, pieces = rank_optimizer(spec, layout, rank)
        theta, gradient = (torch.zeros(pieces.layout.numel) for _ in range(2))
        pieces.read(start, theta)
        pieces.read(two, gradient)
        mine.load(before)
        mine.optimizer.step(theta, gradient)
        mine.save(saved)
        pieces.write(theta, exported)
    assert torch.equal(exported, moved)
    padding = saved_bytes(optimizer, WHOLE.shapes) - 8 - len(alone.state.view(torch.uint8))
    assert torch.equal(saved[: -8 - padding], after[: -8 - padding]) and torch.equal(saved[-8:], after[-8:])


MODEL = ModelConfig(
    vocab_size=64, hidden_size=512, layers=1, heads=4, kv_heads=4, intermediate_size=512, head_dim=128, max_seq_len=16
)


def test_a_cut_through_a_scale_is_refused_by_name() -> None:
    for fits in (Layout(shard=3), Layout(tensor=2), Layout(shard=4, tensor=2)):
        fits.check(MODEL, "adamw8bit", 16)
    with pytest.raises(ConfigError, match=r"adamw8bit has a scale for 256 values, and tp:4 would cut .*, 512 wide"):
        Layout(tensor=4).check(MODEL, "adamw8bit", 16)
