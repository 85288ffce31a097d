"""The step that fits: as little recomputation and as many sequences as the memory has room for."""

from __future__ import annotations

import msgspec
import pytest

from optim.config import CodecConfig, DilocoConfig
from optim.wire_sizes import exchange_of
from peer.config import InnerConfig, ModelConfig
from peer.footprint.device import device_items
from peer.footprint.parameters import parameter_shapes
from peer.footprint.step_size import SMALLEST, StepSize, doubled, sized, step_that_fits
from peer.footprint.workload import Workload

MODEL = ModelConfig(hidden_size=256, layers=8, heads=4, kv_heads=4, intermediate_size=688, max_seq_len=64)


def workload(batch: int = 24) -> Workload:
    return Workload(
        model=MODEL,
        inner=InnerConfig(lr=1e-3, batch_size=batch, total_steps=10, dtype="fp32"),
        exchange=exchange_of(DilocoConfig(steps=10), CodecConfig(), parameter_shapes(MODEL), peers=4),
        blocks=range(MODEL.layers),
        seq_len=64,
        sequences=batch,
    )


def needed(size: StepSize, batch: int = 24) -> float:
    return sum(device_items(sized(workload(batch), size)).values())


def fits(memory: float, batch: int = 24) -> StepSize | None:
    return step_that_fits(workload(batch), memory)


def test_with_room_the_whole_batch_is_on_the_device() -> None:
    assert fits(1e12) == StepSize(24, "none")


@pytest.mark.parametrize("sequences", [16, 8, 4])
def test_with_less_room_micro_batches_come_first(sequences: int) -> None:
    """A CPU is busy with four sequences of 64 tokens, so nothing is computed twice."""
    here, above = (needed(StepSize(size)) for size in (sequences, sequences * 2))
    assert fits(here * 1.25) == StepSize(sequences, "none") and here * 1.25 < above * 1.25


def test_below_that_blocks_are_recomputed() -> None:
    """Two sequences would fit without."""
    found = fits(needed(StepSize(2)) * 1.02)
    assert found is not None and found.recompute != "none" and found.sequences > 2


def test_a_share_of_the_room_stays_free() -> None:
    assert fits(needed(StepSize(24))) != StepSize(24)


def test_nothing_fits_without_room_for_one_sequence() -> None:
    assert fits(needed(SMALLEST)) is None and fits(needed(SMALLEST) * 1.3) is not None


def test_halving_ends_with_the_smallest_step() -> None:
    size: StepSize | None = StepSize(24)
    seen = []
    while size is not None:
        seen.append(size)
        size = size.smaller
    assert seen == [
        *(StepSize(number) for number in (24, 12, 6, 3, 1)),
        StepSize(1, "selective"),
        SMALLEST,
    ]


def test_a_batch_that_is_no_power_of_two_is_tried_whole() -> None:
    assert list(doubled(24)) == [1, 2, 4, 8, 16, 24] and list(doubled(1)) == [1]


def test_a_size_is_checked_where_it_is_decoded() -> None:
    for sequences in (0, -1, 1 << 21):
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert({"sequences": sequences, "recompute": "none"}, StepSize)
