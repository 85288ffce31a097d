"""The gate's weights and the owner's sum."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import CODECS, ROW, Codec, get_codec
from optim.merge import CHUNK, OPEN_GATE, contribution_weights, judge, merge_part
from peer.errors import ProtocolViolation

NORMS = st.floats(1e-6, 1e6)
TOKENS = st.integers(0, 10**9)


def reasons(tokens: list[int], norms: list[float]) -> list[str]:
    return [share.reason for share in judge(tokens, norms)]


def test_weights_are_token_shares_when_norms_agree() -> None:
    assert contribution_weights([100, 300, 200], [1.0, 1.2, 1.1]) == pytest.approx([1 / 6, 3 / 6, 2 / 6])


@given(st.lists(st.tuples(TOKENS, NORMS), min_size=1, max_size=6), st.randoms())
def test_permuting_peers_permutes_the_weights_to_the_bit(work: list[tuple[int, float]], random: object) -> None:
    order = list(range(len(work)))
    random.shuffle(order)  # type: ignore[attr-defined]
    straight = judge([t for t, _ in work], [n for _, n in work])
    shuffled = judge([work[i][0] for i in order], [work[i][1] for i in order])
    assert [straight[i] for i in order] == list(shuffled)


@given(st.lists(st.tuples(TOKENS, st.floats(0, 1e30)), max_size=8))
def test_weights_never_exceed_a_mean(work: list[tuple[int, float]]) -> None:
    shares = judge([t for t, _ in work], [n for _, n in work])
    assert math.fsum(s.weight for s in shares) <= 1 + 1e-12
    assert all((s.weight == 0) == bool(s.reason) for s in shares)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -1.0])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_an_impossible_norm_is_left_out(bad: float, n: int) -> None:
    shares = judge([10] * n, [bad] + [1.0] * (n - 1))
    assert shares[0].weight == 0
    assert shares[0].reason == "not_finite"
    assert math.fsum(s.weight for s in shares) == pytest.approx(1.0 if n > 1 else 0.0)


def test_norms_outside_the_band_are_left_out() -> None:
    assert reasons([5] * 5, [1.0, 1.1, 0.9, 3.4, 0.29]) == ["", "", "", "norm_high", "norm_low"]


def test_a_declared_token_count_is_capped() -> None:
    assert contribution_weights([10, 10, 80], [1.0, 1.0, 1.0])[2] == pytest.approx(3 / 5)
    assert reasons([10, 10, 10**12], [1.0, 1.0, 1.0])[2] == "norm_low"  # so little for so much work


def test_long_updates_are_shortened_to_one_and_a_half_medians() -> None:
    tokens, norms = [1, 1, 1, 1], [1.0, 1.0, 1.0, 2.5]
    weights = contribution_weights(tokens, norms)
    assert weights[:3] == (0.25, 0.25, 0.25)
    assert weights[3] * norms[3] == pytest.approx(0.25 * 1.5)


def test_a_huge_update_has_no_more_influence_than_a_clipped_one() -> None:
    for huge in (2.0, 100.0, 1e30):
        pull = contribution_weights([1, 1], [1.0, huge])[1] * huge
        assert pull <= 0.5 * 1.5 * (1 + 1e-12)
    assert reasons([1, 1, 1, 1], [1.0, 1.0, 1e30, 1e30]) == ["", "", "norm_high", "norm_high"]


@pytest.mark.parametrize("growth", [0.5, 0.75, 1.0])  # of the norm with the number of steps: noise ... drift
@pytest.mark.parametrize("speeds", [(1, 10, 10), (10, 10, 10, 100), (1, 2, 5, 10, 20, 40), (8, 8, 1, 1, 1)])
def test_honest_peers_of_any_speed_pass(growth: float, speeds: tuple[int, ...]) -> None:
    """H by speed: a peer that did a tenth of the steps has a smaller update, and did nothing wrong."""
    norms = [h**growth for h in speeds]
    assert reasons([1000 * h for h in speeds], norms) == [""] * len(speeds)


def test_two_contributors_are_clipped_but_never_left_out() -> None:
    assert reasons([1, 1], [1.0, 1000.0]) == ["", ""]
    assert reasons([1, 1, 1], [1.0, 1.0, 1000.0]) == ["", "", "norm_high"]


def test_idle_contributors_weigh_nothing() -> None:
    assert reasons([0, 5, 5], [0.0, 1.0, 1.0])[0] == "no_tokens"
    assert contribution_weights([5, 5], [0.0, 1.0]) == (0.0, 1.0)
    assert contribution_weights([5, 5], [0.0, 0.0]) == (0.5, 0.5)  # a warm-up at rate 0: nobody moved
    assert contribution_weights([], []) == ()
    assert contribution_weights([0, 0], [1.0, 1.0]) == (0.0, 0.0)


def test_the_open_gate_is_a_weighted_mean() -> None:
    assert contribution_weights([1, 3, 4], [0.0, 1e9, 1.0], OPEN_GATE) == (1 / 8, 3 / 8, 4 / 8)


def slices(codec: Codec, n: int, numel: int) -> tuple[list[torch.Tensor], np.ndarray, list[float]]:
    """n encoded vectors, what they decode to in float64 (n, numel), and weights."""
    generator = torch.Generator().manual_seed(n)
    vectors = [torch.randn(numel, generator=generator) * 10.0**-k for k in range(n)]
    encoded = [codec.encode(v) for v in vectors]
    decoded = np.stack([codec.decode(e, numel).numpy().astype(np.float64) for e in encoded])
    return encoded, decoded, [1 / (k + 2) for k in range(n)]


@pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
@pytest.mark.parametrize("numel", [1, ROW + 3, CHUNK + ROW + 3])
def test_the_sum_is_right_to_one_in_a_million(codec: Codec, numel: int) -> None:
    encoded, decoded, weights = slices(codec, 5, numel)
    merged = merge_part(codec, encoded, weights, numel, get_codec("fp32"))
    got = get_codec("fp32").decode(merged, numel).numpy()
    wanted = np.tensordot(np.array(weights), decoded, 1)
    assert np.linalg.norm(got - wanted) <= 1e-6 * np.linalg.norm(wanted)


@pytest.mark.parametrize("out", ["fp32", "int8", "int4"])
def test_the_result_is_encoded_once_from_the_fp32_sum(out: str) -> None:
    numel = CHUNK + 777
    encoded, _, weights = slices(get_codec("int8"), 3, numel)
    exact = merge_part(get_codec("int8"), encoded, weights, numel, get_codec("fp32"))
    total = get_codec("fp32").decode(exact, numel)
    assert torch.equal(
        merge_part(get_codec("int8"), encoded, weights, numel, get_codec(out)), get_codec(out).encode(total)
    )


@settings(max_examples=20, deadline=None)
@given(st.binary(min_size=104, max_size=104))
def test_any_bytes_merge_to_finite_values_or_are_refused(raw: bytes) -> None:
    codec = get_codec("int8")
    honest = codec.encode(torch.ones(100))
    try:
        merged = merge_part(codec, [honest, raw], [0.5, 0.5], 100, get_codec("fp32"))
    except ProtocolViolation:
        return
    assert bool(torch.isfinite(get_codec("fp32").decode(merged, 100)).all())


def test_merging_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot be merged"):
        merge_part(get_codec("fp32"), [], [], 10, get_codec("fp32"))
