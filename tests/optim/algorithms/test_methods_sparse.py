"""DeMo and SparseLoCo against the papers' formulas in float64, and their wrong variants.

In fp32 a choice of the largest values, a sign or a rounding may turn if the float64 value is within rounding of a tie.
The formulas check that the test problem has no such value (`tests.optim.reference.ties`).
"""

from __future__ import annotations

import pytest
import torch

from optim.algorithms.dct_tiles import Tiling, from_cosines, to_cosines
from optim.algorithms.sparseloco import quantize
from optim.config import DemoConfig, SparseLocoConfig
from optim.wire_sizes import largest_divisor
from peer.config import InnerConfig
from tests.optim.reference import demo, sparseloco
from tests.optim.reference.tiles import CHUNK
from tests.optim.support.rounds import built, trained, weights
from tests.optim.support.trajectory import Arrays, apart

CLOSE = 1e-6  # fp32, sixty steps


def test_demo(short_slices: None) -> None:
    method = DemoConfig(decay=demo.DECAY, topk=demo.KEPT, chunk=CHUNK)
    inner = InnerConfig(lr=demo.LR, batch_size=4, total_steps=100, weight_decay=demo.WEIGHT_DECAY)
    ours = weights(trained(built(method, inner=inner), 1, lr=demo.LR))
    assert apart(ours, demo.demo()) < CLOSE
    assert apart(ours, demo.demo("mean over K")) > 1e-4
    assert apart(ours, demo.demo("decay after the step")) > 1e-5


def trained_sparseloco(bins: int | None, clip: bool) -> list[Arrays]:
    method = SparseLocoConfig(
        steps=sparseloco.STEPS,
        lr=sparseloco.LR,
        topk=sparseloco.KEPT,
        chunk=CHUNK,
        bins=bins or 0,
        ef_decay=sparseloco.DECAY,
        clip_norm=clip,
    )
    return weights(trained(built(method), sparseloco.STEPS))


@pytest.mark.parametrize(("bins", "clip"), [(None, True), (None, False), (4, True), (4, False)])
def test_sparseloco(short_slices: None, bins: int | None, clip: bool) -> None:
    assert apart(trained_sparseloco(bins, clip), sparseloco.sparseloco(bins, clip)) < CLOSE


def test_wrong_variants_of_sparseloco_differ() -> None:
    ours = trained_sparseloco(None, True)
    assert apart(ours, sparseloco.sparseloco(None, True, over_k=True)) > 1e-4
    assert apart(ours, sparseloco.sparseloco(None, False)) > 1e-5


def test_quantized_codes_fit_their_bits() -> None:
    value = torch.randn(50, 8, dtype=torch.float64)
    q, levels, _ = quantize(value, 4)
    assert q.dtype == torch.uint8
    assert int(q.max()) <= 3
    assert levels.dtype == torch.float32
    q, levels, shift = quantize(torch.full((3, 2), 2.5), 4)  # no spread at all
    assert torch.equal(levels[q.long()] + shift, torch.full((3, 2), 2.5))


@pytest.mark.parametrize(("n", "chunk", "found"), [(64, 64, 64), (96, 64, 48), (67, 64, 1), (1, 64, 1), (50, 64, 50)])
def test_the_largest_divisor_is_taken(n: int, chunk: int, found: int) -> None:
    assert largest_divisor(n, chunk) == found


@pytest.mark.parametrize("shape", [(), (5,), (12, 8), (8, 3, 2)])
def test_cutting_and_transforming_can_be_inverted(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, dtype=torch.float64)
    tiling = Tiling.of(shape, 4)
    tiles = tiling.cut(x)
    assert tiles.shape == tiling.size
    assert torch.equal(tiling.join(tiles).view(shape), x)
    assert torch.allclose(from_cosines(to_cosines(tiles, tiling), tiling), tiles, atol=1e-14)
    assert float(to_cosines(tiles, tiling).norm()) == pytest.approx(float(tiles.norm()))
