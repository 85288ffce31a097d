"""PowerSGD's factors, one side a round, merged."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from optim import config
from optim.codecs import get_codec
from optim.codecs.interface import ROW
from optim.strategies import dense, low_rank
from optim.strategies.interface import RoundInfo
from optim.strategies.low_rank import LowRankCoding, LowRankFormat
from optim.strategies.registry import build_strategy
from peer.config import InnerConfig
from peer.errors import ProtocolViolation
from tests.optim.support.layouts import layout_of

TENSORS = {"embed": torch.zeros(96, 32), "gain": torch.zeros(32), "w": torch.zeros(40, 64), "odd": torch.zeros(3, 5)}
LAYOUT = layout_of(TENSORS)
RANK = 2
FP32 = get_codec("fp32")
ZERO = torch.zeros(LAYOUT.numel)


def wire(rank: int = RANK) -> LowRankFormat:
    return LowRankFormat(LAYOUT, [list(LAYOUT.slots)], rank, FP32)


def heard_of(coding: LowRankCoding, messages: list[list[torch.Tensor]], weights: list[float]) -> torch.Tensor:
    heard = torch.zeros(LAYOUT.numel)
    for index in range(coding.count):
        for place, update in coding.updates(index, coding.merge(index, [m[index] for m in messages], weights)):
            heard[place] = update
    return heard


def sent(used: LowRankFormat, coding: LowRankCoding, vector: torch.Tensor) -> list[torch.Tensor]:
    out = [torch.empty(coding.message_bytes(i), dtype=torch.uint8) for i in range(coding.count)]
    sqnorms = used.encode(coding, vector, out)
    for index, (message, sqnorm) in enumerate(zip(out, sqnorms, strict=True)):
        assert coding.message_sqnorm(index, message) == pytest.approx(sqnorm, rel=1e-6)
    return out


@pytest.mark.parametrize(("turn", "numbers"), [(0, 96 + 40), (1, 32 + 64)])
def test_the_size_is_what_one_factor_takes_whatever_the_number_of_senders(turn: int, numbers: int) -> None:
    coding = wire().coding(0, ZERO, turn=turn)
    values = RANK * numbers + 32 + 15
    assert sum(coding.size(i) for i in range(coding.count)) == values < ROW
    assert sum(coding.message_bytes(i) for i in range(coding.count)) == values + 4 * coding.count
    for senders in (1, 8):
        assert sum(coding.result_bytes(i, senders) for i in range(coding.count)) == 4 * values


def test_decoded_plus_residual_is_the_input() -> None:
    ours, asked, heard = wire(), torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel)
    for turn in range(6):
        vector = torch.randn(LAYOUT.numel)
        coding = ours.coding(0, heard, turn=turn)
        messages = sent(ours, coding, vector)
        asked += vector
        if turn == 3:
            ours.restore_residual(coding, messages)
        else:
            heard += heard_of(coding, [messages], [1.0])
        (owed,) = ours.memory(coding)
        assert torch.allclose(heard + owed, asked, rtol=0, atol=2e-5)


@pytest.mark.parametrize("turn", [0, 1])
def test_the_merge_of_factors_is_the_mean_of_the_matrices(turn: int) -> None:
    wires, weights = [wire() for _ in range(3)], [0.5, 0.3, 0.2]
    coding = wires[0].coding(0, torch.randn(LAYOUT.numel), turn=turn)
    messages = [sent(w, coding, torch.randn(LAYOUT.numel)) for w in wires]
    said = [heard_of(coding, [m], [1.0]) for m in messages]
    expected = torch.stack([w * s for w, s in zip(weights, said, strict=True)]).sum(0)
    assert torch.allclose(heard_of(coding, messages, weights), expected, rtol=0, atol=2e-5)


@pytest.mark.parametrize("turn", [0, 1])
def test_an_update_is_the_projection_on_the_basis(turn: int) -> None:
    """In float64, of the rows or of the columns of the momentum."""
    coding = wire().coding(0, torch.randn(LAYOUT.numel), turn=turn)
    vector = torch.randn(LAYOUT.numel)
    said = LAYOUT.views(heard_of(coding, [sent(wire(), coding, vector)], [1.0]))
    for name in ("embed", "w"):
        matrix, q = LAYOUT.views(vector)[name].double(), coding.bases[LAYOUT.slots[name].offset] * 2.0**-22
        expected = matrix @ q @ q.T if turn == 0 else q @ (q.T @ matrix)
        assert torch.allclose(said[name].double(), expected, rtol=0, atol=0.05)
    assert torch.allclose(said["gain"], LAYOUT.views(vector)["gain"], rtol=0, atol=0.05)


def learned(target: torch.Tensor, alternates: bool, rounds: int = 40) -> torch.Tensor:
    """What DiLoCo's momentum and steps make of workers that always ask for the rest of the way."""
    ours, state, momentum = wire(), torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel)
    for number in range(rounds):
        coding = ours.coding(0, momentum, turn=number if alternates else 0)
        update = heard_of(coding, [sent(ours, coding, 0.2 * (target - state))], [1.0])
        momentum = 0.5 * momentum + update
        state = state + 0.5 * momentum
    return state


def test_the_subspace_moves_to_a_target_outside_the_first_one() -> None:
    """A target whose rows and columns are orthogonal to the first bases."""
    target = torch.zeros(LAYOUT.numel)
    firsts = [wire().coding(0, ZERO, turn=turn) for turn in (0, 1)]
    for name in ("embed", "w"):
        slot = LAYOUT.slots[name]
        q, p = (first.bases[slot.offset].float() * 2.0**-22 for first in firsts)
        matrix = torch.randn(slot.shape[0], RANK) @ torch.randn(RANK, slot.shape[1])
        matrix = matrix - matrix @ q @ q.T
        LAYOUT.views(target)[name].copy_(matrix - p @ (p.T @ matrix))
    left = {alternates: float((learned(target, alternates) - target).norm()) for alternates in (True, False)}
    assert left[True] < 0.2 * float(target.norm())
    assert left[False] > 0.9 * float(target.norm())  # an update never leaves the space of its basis


def test_a_large_matrix_is_cut_into_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_rank, "SLICE_VALUES_MAX", 1100)
    monkeypatch.setattr(dense, "SLICE_VALUES_MAX", 1100)
    ours = wire()
    coding = ours.coding(0, ZERO)
    assert [b.rows for blocks in coding.slices for b in blocks] == [34, 34, 28, 1, 17, 17, 6, 3]
    vector = torch.randn(LAYOUT.numel)
    said = heard_of(coding, [sent(ours, coding, vector)], [1.0])
    assert torch.allclose(said + ours.memory(coding)[0], vector, rtol=0, atol=1e-5)


def test_bands_of_rows_are_the_matrix(monkeypatch: pytest.MonkeyPatch) -> None:
    for turn in (0, 1):
        coding = wire().coding(0, torch.randn(LAYOUT.numel), turn=turn)
        messages = [sent(wire(), coding, torch.randn(LAYOUT.numel))]
        whole = heard_of(coding, messages, [1.0])
        with monkeypatch.context() as patch:
            patch.setattr(low_rank, "CHUNK", 200)
            assert torch.equal(heard_of(coding, messages, [1.0]), whole)


def test_zeros_stay_zeros_and_do_not_block_later_messages() -> None:
    ours = wire()
    coding = ours.coding(0, ZERO)
    assert not bool(heard_of(coding, [sent(ours, coding, torch.zeros(LAYOUT.numel))], [1.0]).any())
    assert float(heard_of(coding, [sent(ours, coding, torch.randn(LAYOUT.numel))], [1.0]).norm()) > 1


def test_rounds_alternate_and_a_discarded_one_is_repeated_alike() -> None:
    strategy = build_strategy(
        config.DilocoConfig(steps=5),
        config.CodecConfig(up="powersgd", rank=1),
        LAYOUT,
        InnerConfig(lr=1e-3, batch_size=1, total_steps=10),
    )
    state = [ZERO, torch.randn(LAYOUT.numel)]
    codings = [strategy.coding(RoundInfo(number, 0, 0.0), state) for number in (1, 2, 3, 3)]
    assert [c.of_rows for c in codings if isinstance(c, LowRankCoding)] == [True, False, True, True]
    (third, again) = (c.bases for c in codings[2:] if isinstance(c, LowRankCoding))
    assert all(torch.equal(third[start], again[start]) for start in third)


def test_a_factor_of_numbers_too_large_is_refused() -> None:
    coding = wire().coding(0, torch.randn(LAYOUT.numel))
    coding.bases[0].fill_(2.0**22)  # one row of a basis may be that long
    data = FP32.encode(torch.full((coding.size(0),), 3e38))
    with pytest.raises(ProtocolViolation, match="not finite"):
        list(coding.updates(0, data))


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_any_bytes_decode_or_are_refused(data: st.DataObject) -> None:
    layout = layout_of({"w": torch.zeros(12, 10), "b": torch.zeros(3)})
    format_ = LowRankFormat(layout, [list(layout.slots)], 1, get_codec(data.draw(st.sampled_from(["bf16", "int8"]))))
    coding = format_.coding(0, torch.zeros(layout.numel), turn=data.draw(st.integers(0, 1)))
    size, result_size = coding.message_bytes(0), coding.result_bytes(0, 2)
    message = data.draw(st.binary(min_size=size, max_size=size))
    result = data.draw(st.binary(min_size=result_size, max_size=result_size))
    try:
        norm = coding.message_sqnorm(0, message)
        merged = coding.merge(0, [message, message], [0.5, 0.5])
        assert 0 <= norm < float("inf") and len(merged) == result_size
    except ProtocolViolation:
        pass
    try:
        updates = list(coding.updates(0, result))
    except ProtocolViolation:
        return
    assert sum(len(update) for _, update in updates) == layout.numel
    assert all(bool(torch.isfinite(update).all()) for _, update in updates)
