"""PowerSGD's compressor in one exchange."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.strategies import dense, low_rank
from optim.strategies.dense import MessageFormat
from optim.strategies.interface import RoundInfo
from optim.strategies.low_rank import LowRankCoding, LowRankFormat
from peer.errors import ProtocolViolation
from tests.optim.support.layouts import layout_of

TENSORS = {"embed": torch.zeros(96, 32), "gain": torch.zeros(32), "w": torch.zeros(40, 64), "odd": torch.zeros(3, 5)}
LAYOUT = layout_of(TENSORS)
RANK = 2
ROUND_INFO = RoundInfo(1, 0, 0.0)


def wire() -> LowRankFormat:
    return LowRankFormat(LAYOUT, [list(LAYOUT.slots)], RANK)


def sent(used: MessageFormat, vector: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The messages, and what they say."""
    coding = used.coding(0, vector)
    assert isinstance(coding, LowRankCoding)
    out = [torch.empty(coding.message_bytes(i), dtype=torch.uint8) for i in range(coding.count)]
    used.encode(coding, vector, out)
    heard = torch.zeros(LAYOUT.numel)
    for index, message in enumerate(out):
        for place, update in coding.updates(index, coding.merge(index, [message], [1.0])):
            heard[place] = update
    return out, heard


def test_the_size_is_what_two_factors_take() -> None:
    coding = wire().coding(0, torch.zeros(0))
    factored = 2 * RANK * ((96 + 32) + (40 + 64)) + 2 * 4
    assert sum(coding.message_bytes(i) for i in range(coding.count)) == factored + 2 * (32 + 15)
    assert coding.result_bytes(0, 3) == 8 + 3 * (8 + coding.message_bytes(0))


def test_decoded_plus_residual_is_the_input() -> None:
    ours, asked, heard = wire(), torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel)
    for number in range(6):
        vector = torch.randn(LAYOUT.numel)
        messages, said = sent(ours, vector)
        asked += vector
        if number == 3:
            ours.restore_residual(ours.coding(0, vector), messages)
        else:
            heard += said
        (owed,) = ours._errors.values()
        assert torch.allclose(heard + owed, asked, rtol=0, atol=5e-6)


def test_a_warm_start_finds_the_best_matrix_of_its_rank() -> None:
    """The same input again and again without feedback: power iteration converges to the truncated SVD."""
    ours = wire()
    vector = torch.randn(LAYOUT.numel)
    for _ in range(30):
        _, said = sent(ours, vector)
        next(iter(ours._errors.values())).zero_()
    for name in ("embed", "w"):
        matrix = LAYOUT.views(vector)[name].double().numpy()
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        best = (u[:, :RANK] * s[:RANK]) @ v[:RANK]
        found = LAYOUT.views(said)[name].numpy()
        assert np.linalg.norm(matrix - found) < 1.01 * np.linalg.norm(matrix - best)
    assert torch.equal(LAYOUT.views(said)["gain"], LAYOUT.views(vector)["gain"].bfloat16().float())


def test_the_mean_is_over_all_senders_matrices() -> None:
    wires, weights = [wire() for _ in range(3)], [0.5, 0.3, 0.2]
    messages, said = zip(*(sent(w, torch.randn(LAYOUT.numel)) for w in wires), strict=True)
    coding, mean = wires[0].coding(0, torch.zeros(0)), torch.zeros(LAYOUT.numel)
    for index in range(coding.count):
        for place, update in coding.updates(index, coding.merge(index, [m[index] for m in messages], weights)):
            mean[place] = update
    expected = sum(w * s.double() for w, s in zip(weights, said, strict=True))
    assert torch.allclose(mean.double(), torch.as_tensor(expected), rtol=0, atol=1e-5)


def test_a_large_matrix_is_cut_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "SLICE_VALUES_MAX", 1100)
    monkeypatch.setattr(dense, "SLICE_VALUES_MAX", 1100)
    ours = wire()
    coding = ours.coding(0, torch.zeros(0))
    assert [b.rows for blocks in coding.slices for b in blocks] == [34, 34, 28, 1, 17, 17, 6, 3]
    vector = torch.randn(LAYOUT.numel)
    _, said = sent(ours, vector)
    assert torch.allclose(said + next(iter(ours._errors.values())), vector, rtol=0, atol=1e-6)


def test_zeros_stay_zeros_and_do_not_block_later_messages() -> None:
    ours = wire()
    assert not bool(sent(ours, torch.zeros(LAYOUT.numel))[1].any())
    assert float(sent(ours, torch.randn(LAYOUT.numel))[1].norm()) > 1


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_bytes_decode_or_are_refused(data: st.DataObject) -> None:
    layout = layout_of({"w": torch.zeros(12, 10), "b": torch.zeros(3)})
    coding = LowRankCoding(layout, list(layout.slots), 1)
    size = coding.message_bytes(0)
    messages = [data.draw(st.binary(min_size=size, max_size=size)) for _ in range(2)]
    if data.draw(st.booleans()):
        messages = [b"\0\0\x80\x3a" + message[4:] for message in messages]  # a scale that is one
    try:
        result = coding.merge(0, messages, [0.5, 0.5])
        updates = list(coding.updates(0, result))
        norms = [coding.message_sqnorm(0, message) for message in messages]
    except ProtocolViolation:
        return
    assert sum(len(update) for _, update in updates) == layout.numel
    assert all(bool(torch.isfinite(update).all()) for _, update in updates)
    assert all(0 <= norm < float("inf") for norm in norms)
