"""Hidden states on the wire: how far they are from what they were, against arithmetic in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.inference.wire_rows import TYPES, rows_from, rows_to
from peer.ipc.block_messages import GROUP, WIRE_TYPES, WireType, row_bytes

WIDTHS = (1, 64, GROUP, GROUP + 1, 3 * GROUP + 17)


def there_and_back(hidden: torch.Tensor, wire: WireType) -> torch.Tensor:
    payload = rows_to(hidden, wire)
    assert len(payload) == hidden.shape[0] * row_bytes(hidden.shape[1], wire)
    return rows_from(payload, hidden.shape[1], wire, hidden.dtype)


@given(st.sampled_from(WIDTHS), st.integers(1, 5), st.integers(0, 1 << 30), st.floats(-30, 30))
def test_the_error_is_half_a_step_at_most(width: int, count: int, seed: int, power: float) -> None:
    """A step is a 127th of the largest value of a group in int8, a 256th of the value itself in bf16."""
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(count, width, generator=random) * 10**power
    exact = hidden.double()
    assert there_and_back(hidden, "fp32").equal(hidden)
    bf16 = there_and_back(hidden, "bf16").double()
    assert bool(((bf16 - exact).abs() <= exact.abs() / 256).all())
    int8 = there_and_back(hidden, "int8").double()
    for start in range(0, width, GROUP):
        part = slice(start, start + GROUP)
        step = exact[:, part].abs().amax(1, keepdim=True) / 127
        assert bool(((int8[:, part] - exact[:, part]).abs() <= step * (0.5 + 1e-4)).all())


def test_a_channel_of_outliers_costs_only_its_group() -> None:
    """Real models have channels a thousand times as large as the others."""
    hidden = torch.randn(8, 4 * GROUP, generator=torch.Generator().manual_seed(1))
    hidden[:, 5] = 1000.0
    error = (there_and_back(hidden, "int8") - hidden).double().abs()
    assert float(error[:, GROUP:].max()) < 4 / 127 and float(error[:, :GROUP].max()) > 0.5


@pytest.mark.parametrize("wire", WIRE_TYPES)
@pytest.mark.parametrize("dtype", list(TYPES.values()))
def test_what_is_finite_stays_so_and_what_is_not_does_not(wire: WireType, dtype: torch.dtype) -> None:
    largest = torch.finfo(dtype).max
    edge = torch.tensor([[largest, -largest, 0.0, torch.finfo(dtype).tiny]], dtype=dtype)
    assert bool(there_and_back(edge, wire).isfinite().all())
    assert there_and_back(torch.zeros(2, 4, dtype=dtype), wire).equal(torch.zeros(2, 4, dtype=dtype))
    hostile = memoryview(bytearray(b"\xff" * row_bytes(4, wire)))
    assert not bool(rows_from(hostile, 4, wire, dtype).isfinite().any())


@pytest.mark.parametrize("wire", WIRE_TYPES)
def test_rows_stand_alone(wire: WireType) -> None:
    """What a server has sent is cut between rows when it is sent again."""
    hidden = torch.randn(6, 300, generator=torch.Generator().manual_seed(2))
    payload, width = rows_to(hidden, wire), row_bytes(300, wire)
    parts = [rows_from(payload[at * width : (at + 2) * width], 300, wire, torch.float32) for at in (0, 2, 4)]
    assert torch.cat(parts).equal(there_and_back(hidden, wire))
    assert b"".join(rows_to(row[None], wire) for row in hidden) == bytes(payload)
