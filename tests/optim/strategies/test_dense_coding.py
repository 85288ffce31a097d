"""How vectors are cut into slices."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from optim.codecs import get_codec
from optim.strategies.dense import DenseCoding, Feedback
from optim.strategies.interface import Sent
from peer.errors import ProtocolViolation


@given(
    st.one_of(st.integers(1, 100_000), st.integers(10**6, 10**10)),
    st.sampled_from(["fp32", "fp16", "int8", "int4"]),
    st.sampled_from(["fp32", "fp16", "int8", "int4"]),
)
def test_slices_tile_the_vector_at_multiples_of_the_granule(numel: int, up: str, down: str) -> None:
    cut = DenseCoding([slice(0, numel)], get_codec(up), get_codec(down))
    for index in {0, cut.count // 2, cut.count - 1}:
        span = cut.span(index)
        assert span.start % get_codec(up).granule == 0 == span.start % get_codec(down).granule
        assert cut.size(index) == span.stop - span.start > 0
        assert index + 1 == cut.count or cut.span(index + 1).start == span.stop
    assert cut.span(cut.count - 1).stop == numel


def test_updates_land_at_their_places() -> None:
    places = [slice(100, 70_100), slice(200_000, 200_001), slice(300_000, 390_000)]
    coding = DenseCoding(places, get_codec("fp32"), get_codec("fp32"))
    whole = torch.randn(400_000)
    message = torch.cat([whole[place] for place in places])
    rebuilt = torch.zeros_like(whole)
    for index in range(coding.count):
        data = get_codec("fp32").encode(message[coding.span(index)])
        for place, update in coding.updates(index, data):
            rebuilt[place] += update
    expected = torch.zeros_like(whole)
    for place in places:
        expected[place] = whole[place]
    assert torch.equal(rebuilt, expected)


@pytest.mark.parametrize("up", ["topk", "sign"])
def test_decoded_plus_residual_is_the_input(up: str) -> None:
    coding = DenseCoding([slice(0, 50_000)], get_codec(up), get_codec("fp32"))
    feedback, asked, heard, last = Feedback(), torch.zeros(50_000), torch.zeros(50_000), torch.zeros(50_000)
    for _ in range(5):
        vector = torch.randn(50_000)
        out = [torch.empty(coding.message_bytes(i), dtype=torch.uint8) for i in range(coding.count)]
        feedback.encode(coding, vector, out)
        last = torch.cat([coding.up.decode(out[i], coding.size(i)) for i in range(coding.count)])
        asked, heard = asked + vector, heard + last
    owed = next(iter(feedback._residuals.values()))
    assert float((heard + owed - asked).norm() / asked.norm()) < 1e-5
    feedback.restore_residual(coding, out)  # the last message was not merged
    assert float((heard - last + owed - asked).norm() / asked.norm()) < 1e-5


def test_a_result_longer_than_all_contributions_is_refused() -> None:
    coding = DenseCoding([slice(0, 1000)], get_codec("fp32"), get_codec("fp32"))
    mean = get_codec("fp32").encode(torch.ones(1000))
    sent = [Sent(b"", 1000.0, 0.5), Sent(b"", 1000.0, 0.5)]
    coding.check_result([0], [mean], sent)
    with pytest.raises(ProtocolViolation, match="larger than any merge"):
        coding.check_result([0], [get_codec("fp32").encode(torch.full((1000,), 9.0))], sent)
