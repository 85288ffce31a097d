"""The merge rules against float64 references, and what must hold of any contributions."""

from __future__ import annotations

import math
from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.codecs import ROW, Codec, get_codec
from optim.codecs.interface import bytes_of
from optim.config import ONE_MESSAGE, CodecConfig, DilocoConfig, StreamingConfig
from optim.merge import contribution_weights, equal_weights, merge_part
from optim.rules.flag import FlagRule
from optim.rules.interface import MeanRule, MergeRule
from optim.rules.registry import build_rule
from optim.rules.trimmed import MEDIAN, TrimmedMeanRule, network
from optim.strategies.dense import DenseCoding
from optim.strategies.interface import Sent
from peer.errors import ProtocolViolation

FP32 = get_codec("fp32")
MEDIAN_RULE = TrimmedMeanRule(MEDIAN)
RULES: dict[str, MergeRule] = {
    "mean": MeanRule(),
    "trimmed_mean": TrimmedMeanRule(0.25),
    "median": MEDIAN_RULE,
    "flag": FlagRule(),
}
VALUES = st.floats(-1e6, 1e6, width=32)


def merged(rule: MergeRule, vectors: torch.Tensor, weights: list[float] | None = None) -> torch.Tensor:
    """Merge vectors (n, c) in fp32, in the order of their bytes, as an owner does. `weights`: alike unless given."""
    n, numel = vectors.shape
    coding = DenseCoding([slice(0, numel)], FP32, FP32, rule)
    assert coding.count == 1
    result = coding.merge(0, [FP32.encode(v.contiguous()) for v in vectors], weights or [1 / n] * n)
    return FP32.decode(result, numel)


def randoms(n: int, numel: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(n, numel, generator=torch.Generator().manual_seed(seed))


# -- against references ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", range(1, 18))
@pytest.mark.parametrize("trim", [0.1, 0.25, 0.4, 0.49])
def test_the_trimmed_mean_is_scipys(n: int, trim: float) -> None:
    from scipy.stats import trim_mean  # here: every worker of pytest imports this module, and scipy takes 0.5 s

    vectors = randoms(n, 3000)
    wanted = trim_mean(vectors.double().numpy(), trim, axis=0)
    assert np.abs(merged(TrimmedMeanRule(trim), vectors).numpy() - wanted).max() < 1e-6


@pytest.mark.parametrize("n", [*range(1, 18), 33, 64])
def test_the_median_is_numpys(n: int) -> None:
    vectors = randoms(n, 2 * ROW + 5)
    assert np.abs(merged(MEDIAN_RULE, vectors).numpy() - np.median(vectors.double().numpy(), axis=0)).max() < 1e-6


@pytest.mark.parametrize("name", ONE_MESSAGE)
@pytest.mark.parametrize("n", [3, 16])
def test_every_codec_is_merged_in_pieces(name: str, n: int) -> None:
    """More values than one piece holds, and an end that fills no row."""
    codec: Codec = get_codec(name)
    numel = max(9 * ROW, 2 * codec.granule) + 77
    encoded = [codec.encode(v.contiguous()) for v in randoms(n, numel)]
    decoded = np.stack([codec.decode(e, numel).double().numpy() for e in encoded])
    got = FP32.decode(MEDIAN_RULE.merge(codec, encoded, [1 / n] * n, numel, FP32), numel).numpy()
    assert np.abs(got - np.median(decoded, axis=0)).max() < 1e-6
    for out in ("int8", "bf16"):
        again = MEDIAN_RULE.merge(codec, encoded, [1 / n] * n, numel, get_codec(out))
        assert torch.equal(again, get_codec(out).encode(torch.from_numpy(got)))


@pytest.mark.parametrize("n", range(1, 14))
def test_a_sorting_network_sorts(n: int) -> None:
    """All vectors of 0 and 1 (Knuth's zero-one principle), for the middle ranks and for all."""
    every = np.arange(1 << n)[:, None] >> np.arange(n) & 1
    for first, last in ((0, n), ((n - 1) // 2, n // 2 + 1)):
        rows = [column.copy() for column in every.T]
        for low, high, wants_low, wants_high in network(n, first, last):
            least, most = np.minimum(rows[low], rows[high]), np.maximum(rows[low], rows[high])
            rows[low] = least if wants_low else np.full_like(least, -1)
            rows[high] = most if wants_high else np.full_like(most, -1)
        assert np.array_equal(np.stack(rows[first:last]), np.sort(every, axis=1).T[first:last])


def test_the_cut_counts_contributors() -> None:
    assert [TrimmedMeanRule(0.25).cut(n) for n in (1, 2, 3, 4, 7, 8, 16)] == [0, 0, 0, 1, 1, 2, 4]
    assert [MEDIAN_RULE.cut(n) for n in (1, 2, 3, 4, 7, 8)] == [0, 0, 1, 1, 3, 3]
    assert TrimmedMeanRule(0.29).cut(100) == 29
    for n in range(1, 200):
        assert all(n - 2 * TrimmedMeanRule(trim).cut(n) >= 1 for trim in (0.01, 0.49, 0.5))
    for trim in (0.0, 0.51, math.nan):
        with pytest.raises(ValueError, match="set it above 0"):
            TrimmedMeanRule(trim)


# -- what must hold --------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(
    st.integers(1, 16).flatmap(lambda n: st.lists(st.lists(VALUES, min_size=n, max_size=n), min_size=1, max_size=5)),
    st.floats(0.01, 0.5),
    st.data(),
)
def test_few_liars_stay_within_the_honest_range(columns: list[list[float]], trim: float, data: st.DataObject) -> None:
    """With f < trim * n liars, whatever they send, each coordinate lies between two honest values."""
    rule = TrimmedMeanRule(trim)
    vectors = torch.tensor(columns).T.contiguous()
    n = len(vectors)
    f = data.draw(st.integers(0, max(0, min(math.ceil(trim * n) - 1, (n - 1) // 2))))
    honest = vectors[f:]
    low, high = honest.min(0).values, honest.max(0).values
    slack = 1e-6 * torch.maximum(low.abs(), high.abs())  # of the mean's rounding
    got = merged(rule, vectors)
    assert bool((got >= low - slack).all()) and bool((got <= high + slack).all())


@pytest.mark.parametrize("name", RULES)
def test_the_order_of_contributors_changes_no_bit(name: str) -> None:
    vectors = randoms(4, 500)
    weights = [0.1, 0.2, 0.3, 0.4] if name in ("mean", "flag") else [0.25] * 4
    first = merged(RULES[name], vectors, weights)
    for order in permutations(range(4)):
        assert torch.equal(merged(RULES[name], vectors[list(order)], [weights[i] for i in order]), first)


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", [1, 2, 3, 4, 8, 16])
def test_of_contributions_all_alike_each_rule_is_the_mean(name: str, n: int) -> None:
    one = randoms(1, 1000)
    got = merged(RULES[name], one.expand(n, -1))
    assert torch.allclose(got, one[0], rtol=1e-6, atol=1e-7)
    assert torch.equal(merged(MEDIAN_RULE, one.expand(n, -1)), one[0])


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("n", [1, 2])
def test_of_two_each_rule_is_the_mean(name: str, n: int) -> None:
    """Of two it is unknown which one is wrong."""
    vectors = randoms(n, 1000)
    assert torch.allclose(merged(RULES[name], vectors), vectors.mean(0), rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", RULES)
@settings(deadline=None, max_examples=30)
@given(columns=st.lists(st.lists(VALUES, min_size=5, max_size=5), min_size=2, max_size=6))
def test_no_merge_is_longer_than_its_bound(name: str, columns: list[list[float]]) -> None:
    vectors = torch.tensor(columns).T.contiguous()
    weights = [0.2] * 5
    squares = [float(v.double().square().sum()) for v in vectors]
    bound = RULES[name].norm_bound(weights, squares)
    assert float(merged(RULES[name], vectors, weights).double().norm()) <= bound * (1 + 1e-4) + 1e-6


@pytest.mark.parametrize("name", RULES)
def test_a_result_beyond_the_bound_is_refused(name: str) -> None:
    vectors = randoms(4, 1000)
    coding = DenseCoding([slice(0, 1000)], FP32, FP32, RULES[name])
    encoded = [FP32.encode(v.contiguous()) for v in vectors]
    sent = [Sent(b"", FP32.decoded_sqnorm(e, 1000), 0.25) for e in encoded]
    result = coding.merge(0, encoded, [0.25] * 4)
    coding.check_result([0], [result], sent)
    with pytest.raises(ProtocolViolation, match="larger than any merge"):
        coding.check_result([0], [FP32.encode(FP32.decode(result, 1000) * 100)], sent)


def test_a_median_may_be_longer_than_each_contribution() -> None:
    """So the mean's bound would refuse it."""
    vectors = torch.tensor([[1.0, 1, 0], [1, 0, 1], [0, 1, 1]])
    squares = [2.0, 2.0, 2.0]
    length = float(merged(MEDIAN_RULE, vectors).norm())
    assert MeanRule().norm_bound([1 / 3] * 3, squares) < length <= MEDIAN_RULE.norm_bound([1 / 3] * 3, squares)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@pytest.mark.parametrize("name", RULES)
@settings(max_examples=20, deadline=None)
@given(raw=st.binary(min_size=400, max_size=400))
def test_any_bytes_merge_to_finite_values_or_are_refused(name: str, codec: str, raw: bytes) -> None:
    code = get_codec(codec)
    honest = code.encode(torch.ones(100))
    try:
        result = RULES[name].merge(code, [honest, raw[: len(honest)], honest], [1 / 3] * 3, 100, FP32)
    except ProtocolViolation:
        return
    assert bool(torch.isfinite(FP32.decode(result, 100)).all())


def test_a_zero_has_no_sign() -> None:
    """Which zero a minimum returns depends on the CPU."""
    for signs in ([1.0, -1.0, 1.0], [-1.0, -1.0, 1.0], [-1.0, -1.0, -1.0]):
        got = merged(MEDIAN_RULE, torch.tensor(signs)[:, None] * torch.zeros(3, 10))
        assert bytes_of(FP32.encode(got)) == bytes(40)


# -- weights -----------------------------------------------------------------------------------------------------------


def test_contributors_count_alike_whatever_work_they_claim() -> None:
    assert equal_weights([10, 10, 25], [1.0, 1.0, 1.2]) == (1 / 3, 1 / 3, 1 / 3)
    assert MEDIAN_RULE.weights([10, 30, 10], [1.0, 1.5, 1.0]) == (1 / 3, 1 / 3, 1 / 3)
    assert FlagRule().weights([10, 30, 10], [1.0, 1.5, 1.0]) == contribution_weights([10, 30, 10], [1.0, 1.5, 1.0])


def test_the_gate_still_clips_and_leaves_out() -> None:
    """Of two contributors nothing is cut, so the clip is all there is."""
    assert MEDIAN_RULE.weights([1, 1], [1.0, 1000.0]) == (0.5, 0.5 * 1.5 / 1000)
    assert MEDIAN_RULE.weights([1, 1, 1, 0], [1.0, 1.0, 1000.0, 1.0]) == (0.5, 0.5, 0.0, 0.0)
    assert equal_weights([], []) == () and equal_weights([0], [1.0]) == (0.0,)
    vectors = torch.tensor([[1.0], [1000.0]])
    assert float(merged(MEDIAN_RULE, vectors, [0.5, 0.5 * 1.5 / 1000])) == pytest.approx(1.25)


def test_the_default_is_the_mean_bit_for_bit() -> None:
    vectors, weights = randoms(5, 3 * ROW), [0.1, 0.15, 0.2, 0.25, 0.3]
    encoded = sorted((bytes_of(FP32.encode(v.contiguous())), w) for v, w in zip(vectors, weights, strict=True))
    plain = merge_part(FP32, [e for e, _ in encoded], [w for _, w in encoded], 3 * ROW, FP32)
    assert torch.equal(merged(build_rule(DilocoConfig(steps=1)), vectors, weights), FP32.decode(plain, 3 * ROW))


def test_rules_follow_the_setting() -> None:
    trimmed = build_rule(StreamingConfig(steps=4, merge="trimmed_mean", trim=0.1))
    assert isinstance(trimmed, TrimmedMeanRule) and trimmed.trim == 0.1
    median = build_rule(DilocoConfig(steps=4, merge="median"))
    assert isinstance(median, TrimmedMeanRule) and median.trim == MEDIAN
    assert isinstance(build_rule(DilocoConfig(steps=4, merge="flag")), FlagRule)
    assert CodecConfig().up in ONE_MESSAGE
