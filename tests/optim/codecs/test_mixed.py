"""Messages whose parts are in codecs of the sender's choice."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs.mixed import CODES, MixedCode
from peer.errors import ProtocolViolation

LENGTHS = (4096, 64, 8192, 1, 5000)
N = sum(LENGTHS)
LAST = len(CODES) - 1


def vector(*scales: float) -> torch.Tensor:
    """Parts of these sizes."""
    return torch.cat([torch.randn(length) * scale for length, scale in zip(LENGTHS, scales, strict=True)])


def error(choices: tuple[int, ...], x: torch.Tensor) -> float:
    """The squared error in float64."""
    return math.fsum(part_error(choice, part) for choice, part in zip(choices, x.split(LENGTHS), strict=True))


def part_error(choice: int, part: torch.Tensor) -> float:
    code = CODES[choice]
    return float((code.decode(code.encode(part), len(part)).double() - part).square().sum())


def room(choices: tuple[int, ...]) -> int:
    return len(choices) + sum(CODES[c].encoded_size(length) for c, length in zip(choices, LENGTHS, strict=True))


@pytest.mark.parametrize("bits", [1.25, 2.0, 3.0, 4.5, 8.0])
def test_the_choice_is_the_best_of_all_by_brute_force(bits: float) -> None:
    """Parts of at most two rows are judged as a whole; of 5,000 values the first row tells."""
    code = MixedCode(LENGTHS, bits)
    for scales in ((1, 1, 1, 1, 1), (0.01, 1, 3, 10, 0.1), (5, 0.1, 0.02, 0, 1)):
        x = vector(*scales)
        chosen = tuple(code.encode(x)[: len(LENGTHS)].tolist())
        lost = [[part_error(choice, part) for choice in range(len(CODES))] for part in x.split(LENGTHS)]
        every = itertools.product(range(len(CODES)), repeat=len(LENGTHS))
        within = (choices for choices in every if room(choices) <= code.encoded_size(N))
        best = min(math.fsum(lost[i][choice] for i, choice in enumerate(choices)) for choices in within)
        assert room(chosen) <= code.encoded_size(N)
        assert error(chosen, x) <= 1.02 * best


def test_loud_parts_get_more_bits() -> None:
    assert MixedCode(LENGTHS, 3.0).choose(vector(3, 3, 0.01, 3, 0.01)) == [0, 0, LAST, 0, LAST]


@pytest.mark.parametrize("bits", [1.25, 3.0, 8.0])
def test_the_size_is_as_foretold_and_decoding_follows_the_choices(bits: float) -> None:
    code = MixedCode(LENGTHS, bits)
    size = code.encoded_size(N)
    assert size == pytest.approx(bits * N / 8, rel=0.001)
    x = vector(1, 2, 3, 4, 5)
    data, sqnorm = code.encode_with_sqnorm(x)
    decoded = code.decode(data.numpy().tobytes(), N)
    assert len(data) == size
    assert error(tuple(data[: len(LENGTHS)].tolist()), x) == pytest.approx(
        float((decoded.double() - x).square().sum()), rel=1e-9
    )
    assert sqnorm == pytest.approx(float(decoded.double().square().sum()), rel=1e-9)
    assert code.decoded_sqnorm(data, N) == pytest.approx(sqnorm, rel=1e-12)


def test_tiny_parts_may_need_more_than_the_bits_say() -> None:
    code = MixedCode([1] * 9, 1.25)
    assert code.encoded_size(9) == 9 * (1 + 3)
    assert torch.equal(code.decode(code.encode(torch.ones(9)), 9), torch.ones(9))


def test_a_choice_that_is_none_or_exceeds_the_size_is_refused() -> None:
    code = MixedCode(LENGTHS, 2.0)
    data = code.encode(vector(1, 1, 1, 1, 1))
    for place, wrong, reason in ((1, len(CODES), "chooses"), (2, 255, "chooses"), (-1, 7, "holds more")):
        changed = data.clone()
        changed[place] = wrong
        with pytest.raises(ProtocolViolation, match=reason):
            code.decode(changed, N)
    data[: len(LENGTHS)] = 0
    with pytest.raises(ProtocolViolation, match="take"):
        code.decoded_sqnorm(data, N)


SMALL_LENGTHS = (130, 3, 40)
SMALL = MixedCode(SMALL_LENGTHS, 4.0)
SIZE = SMALL.encoded_size(173)


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.integers(0, len(CODES)), min_size=3, max_size=3), st.binary(min_size=SIZE, max_size=SIZE), st.booleans()
)
def test_any_bytes_decode_or_are_refused(choices: list[int], rest: bytes, padded: bool) -> None:
    data = bytes(choices) + rest[3:]
    if padded and max(choices) < len(CODES):
        end = 3 + sum(CODES[c].encoded_size(n) for c, n in zip(choices, SMALL_LENGTHS, strict=True))
        data = (data[:end] + bytes(SIZE))[:SIZE]
    try:
        decoded, sqnorm = SMALL.decode(data, 173), SMALL.decoded_sqnorm(data, 173)
    except ProtocolViolation:
        return
    assert decoded.shape == (173,) and bool(torch.isfinite(decoded).all())
    assert 0 <= sqnorm < math.inf
    assert sqnorm == pytest.approx(float(decoded.double().square().sum()), rel=1e-6)
    for size in (SIZE - 1, SIZE + 1):
        with pytest.raises(ProtocolViolation, match="bytes instead"):
            SMALL.decode((data + b"\0")[:size], 173)


def test_a_value_that_is_not_finite_is_refused() -> None:
    x = vector(1, 1, 1, 1, 1)
    x[-1] = torch.nan
    with pytest.raises(ProtocolViolation, match="diverged"):
        MixedCode(LENGTHS, 3.0).encode(x)
