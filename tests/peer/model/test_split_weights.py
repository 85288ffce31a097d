"""Split weights against the definition in float64, and their bounds for all values."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from peer.model.split_weights import CODE_MAX, SplitVector
from tests.peer.devices import DEVICES

LARGEST = float(torch.finfo(torch.bfloat16).max)
SMALLEST = 2.0**-133  # of bf16 above 0
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False, min_value=-LARGEST, max_value=LARGEST)
EVERYWHERE = slice(None)


def half_distance(narrow: torch.Tensor) -> torch.Tensor:
    """Return half of the distance of bf16 values to their neighbours away from zero, float64."""
    _, exponents = torch.frexp(narrow.double())
    exponents = exponents.where(narrow != 0, -125).clamp(min=-125)
    return torch.exp2((exponents - 9).double())


def values_everywhere() -> torch.Tensor:
    """Return normal, tiny and subnormal values, borders of binades and their neighbours, and zeros of both signs."""
    draw = torch.Generator().manual_seed(3)
    drawn = torch.randn(20_000, generator=draw) * torch.exp2(
        torch.randint(-140, 100, (20_000,), generator=draw).float()
    )
    powers = torch.exp2(torch.arange(-149.0, 128.0))
    near = [torch.nextafter(powers, powers * side) for side in (0.0, 2.0)]
    found = torch.cat([drawn, powers, *near, torch.zeros(1)])
    return torch.cat([found, -found])


@pytest.mark.parametrize("device", DEVICES)
def test_codes_are_those_of_the_definition(device: str) -> None:
    """The correction is the error in parts of half a distance; below a power of two the parts are half as large."""
    values = values_everywhere()
    made = SplitVector.of(values.to(device))
    narrow, code = made.narrow.cpu(), made.correction.cpu().double()
    assert torch.equal(narrow, values.bfloat16())
    error = values.double() - narrow.double()
    below = (
        (narrow.double().abs().frexp()[0] == 0.5) & (values.abs() < narrow.float().abs()) & (values.abs() > 2.0**-126)
    )
    exact = error / (half_distance(narrow) * torch.where(below, 0.5, 1.0)) * CODE_MAX
    assert float((code * torch.where(values.signbit(), -1.0, 1.0) - exact).abs().max()) <= 0.5
    assert below.sum() > 200


@pytest.mark.parametrize("device", DEVICES)
def test_values_come_back_within_a_256th_of_a_distance(device: str) -> None:
    values = values_everywhere()
    made = SplitVector.of(values.to(device))
    back = made.read(EVERYWHERE).cpu()
    error = (back.double() - values.double()).abs()
    assert bool((error <= half_distance(made.narrow.cpu()) / 128).all())
    normal = values.abs() >= 2.0**-126
    relative = error[normal] / values[normal].abs().double()
    assert float(relative.max()) < 2.0**-15.9
    rounded = (values[normal].bfloat16().double() - values[normal].double()).abs() / values[normal].abs().double()
    assert float(rounded.mean()) > 200 * float(relative.mean())


@given(st.lists(FLOATS, min_size=1, max_size=8))
def test_any_values_are_held_to_the_bound_and_stay(given_values: list[float]) -> None:
    values = torch.tensor(given_values)
    made = SplitVector.of(values)
    back = made.read(EVERYWHERE)
    assert bool(back.isfinite().all()) and torch.equal(back.signbit(), values.signbit())
    assert bool(((back - values).double().abs() <= half_distance(made.narrow) / 128).all())
    again = SplitVector.of(back).read(EVERYWHERE)
    assert torch.equal(again.view(torch.int32), back.view(torch.int32))  # also the sign of a zero


@given(st.lists(st.integers(-(1 << 15), (1 << 15) - 1), min_size=1, max_size=8))
def test_what_bf16_holds_is_exact(bits: list[int]) -> None:
    """Also infinities; a NaN stays one."""
    narrow = torch.tensor(bits, dtype=torch.int16).view(torch.bfloat16)
    made = SplitVector.of(narrow.float())
    back, is_nan = made.read(EVERYWHERE), narrow.isnan()
    assert torch.equal(back.isnan(), is_nan)
    assert torch.equal(back[~is_nan].view(torch.int32), narrow[~is_nan].float().view(torch.int32))
    assert not made.correction[~is_nan].any()


def test_every_pair_is_what_its_value_becomes() -> None:
    """All corrections of some bf16 values: reading and writing changes none, but a tie may go to the even neighbour."""
    codes = torch.arange(-CODE_MAX, CODE_MAX + 1, dtype=torch.int8)
    for value in (1.0, -1.0, 1.5, 3.0e-39, -SMALLEST * 9, 2.0**100):
        narrow = torch.full((len(codes),), value).bfloat16()
        held = SplitVector(narrow, codes)
        back = held.read(EVERYWHERE)
        again = SplitVector.of(back)
        inner = slice(1, -1)
        assert torch.equal(again.narrow[inner], narrow[inner]) and torch.equal(again.correction[inner], codes[inner])
        assert torch.equal(again.read(EVERYWHERE), back)
        assert bool((back.diff() * math.copysign(1.0, value) > 0).all())


def test_a_part_is_written_alone() -> None:
    held = SplitVector.of(torch.linspace(-1, 1, 100))
    before = held.read(EVERYWHERE)
    held.write(slice(10, 20), torch.full((10,), 1 / 3))
    after = held.read(EVERYWHERE)
    assert torch.equal(after[:10], before[:10]) and torch.equal(after[20:], before[20:])
    assert torch.allclose(after[10:20], torch.tensor(1 / 3), rtol=2e-5)
    assert torch.equal(held.read(slice(15, 25)), after[15:25])
