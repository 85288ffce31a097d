"""L-GreCo's choice of bits for each slice."""

from __future__ import annotations

import pytest
import torch

from optim.codecs import get_codec
from optim.strategies.allocated import AllocatedFormat, choose

N = 14 * 16_384


def momentum() -> torch.Tensor:
    """Slices of very different lengths, one of them all 0."""
    generator = torch.Generator().manual_seed(3)
    scales = torch.logspace(-3, 0, 14)
    scales[5] = 0
    return (torch.randn(14, 16_384, generator=generator) * scales[:, None]).view(-1)


def error(codes: list[str], slices: list[torch.Tensor]) -> float:
    """Measured on the whole; a ternary code's is the mean of many draws."""
    total = 0.0
    for name, values in zip(codes, slices, strict=True):
        code = get_codec(name)
        draws = 20 if name == "ternary" else 1
        lost = [code.decode(code.encode(values), len(values)) - values for _ in range(draws)]
        total += sum(float(e.double().square().sum()) for e in lost) / draws
    return total


@pytest.mark.parametrize("budget", [0.5, 1.0, 3.0])
def test_the_choice_keeps_the_budget_and_saves_bytes(budget: float) -> None:
    slices = list(momentum().split(16_384))
    chosen = [code.name for code in choose(slices, budget)]
    usual = error(["int4"] * 14, slices)
    assert error(chosen, slices) <= 1.15 * budget * usual  # it was chosen by a sample
    assert chosen[5] == "int4"  # which tells nothing
    if budget >= 1:
        assert chosen[0] == "ternary"
        size = sum(get_codec(name).encoded_size(16_384) for name in chosen)
        assert size < 14 * get_codec("int4").encoded_size(16_384)
    if budget < 1:
        assert chosen[-1] == "int8"


def test_an_impossible_budget_takes_the_finest_codec() -> None:
    slices = list(momentum().split(16_384))
    assert {code.name for i, code in enumerate(choose(slices, 1e-9)) if i != 5} == {"int8"}


def test_the_choice_can_be_ended_between_two_slices() -> None:
    """It takes seconds in a large model, which a peer that ends does not wait for."""
    checks: list[int] = []

    def check() -> None:
        checks.append(1)
        if len(checks) == 3:
            raise KeyboardInterrupt

    wire = AllocatedFormat([[slice(0, N)]], get_codec("int8"), 1.0)
    with pytest.raises(KeyboardInterrupt):
        wire.coding(0, momentum(), check)
    assert len(checks) == 3


def test_members_choose_alike_from_the_rounds_fragment() -> None:
    """Independent of random generators and of threads."""
    half = N // 2
    vector = torch.cat([momentum()[half:].flip(0), momentum()[half:]])
    wire = AllocatedFormat([[slice(0, half)], [slice(half, N)]], get_codec("int8"), 1.0)
    torch.manual_seed(1)
    first = wire.coding(1, vector)
    torch.manual_seed(2)
    second = wire.coding(1, vector.clone())
    names = [first.code(i).name for i in range(first.count)]
    assert names == [second.code(i).name for i in range(second.count)]
    assert names != [wire.coding(0, vector).code(i).name for i in range(first.count)]
    assert first.places == (slice(half, N),)


def test_the_first_round_uses_four_bits_everywhere() -> None:
    wire = AllocatedFormat([[slice(0, N)]], get_codec("int8"), 1.0)
    coding = wire.coding(0, torch.zeros(N))
    assert {coding.code(i).name for i in range(coding.count)} == {"int4"}
    out = [torch.empty(coding.message_bytes(i), dtype=torch.uint8) for i in range(coding.count)]
    wire.encode(coding, momentum(), out)
    assert sum(len(piece) for piece in out) == get_codec("int4").encoded_size(N)
