"""DeMo and SparseLoCo on the network: slices, memory, and hostile bytes."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from optim.algorithms.demo import DemoScheme
from optim.algorithms.packing import Sparse
from optim.algorithms.sparse import Scheme
from optim.algorithms.sparseloco import SparseLocoScheme
from optim.strategies import dense, sparse
from optim.strategies.interface import Sent
from optim.strategies.sparse import DemoStrategy, SparseCoding, SparseLocoStrategy, SparseStrategy
from peer.errors import ProtocolViolation
from tests.optim.support.layouts import layout_of
from tests.optim.support.rounds import Rounds, decoded, encoded

TENSORS = {
    "embed": torch.zeros(256, 128),
    "gain": torch.zeros(64),
    "w": torch.zeros(128, 192),
    "odd": torch.zeros(3, 5),
}
LAYOUT = layout_of(TENSORS)
SMALL = layout_of({"w": torch.zeros(4, 8), "b": torch.zeros(6)})
SCHEMES = {"demo": DemoScheme(), "sparseloco": SparseLocoScheme(), "unquantized": SparseLocoScheme(bins=None)}


def strategy(name: str) -> SparseStrategy:
    scheme = SCHEMES[name]
    if isinstance(scheme, DemoScheme):
        return DemoStrategy(LAYOUT, scheme, 64)
    return SparseLocoStrategy(LAYOUT, scheme, 64)  # type: ignore[arg-type]


def test_a_message_takes_the_documented_bits() -> None:
    """Of whole 64 x 64 tiles: demo 32 of 4096 at 12 + 32 bits, sparseloco 64 at 12 + 2."""
    layout = layout_of({"w": torch.zeros(1024, 2048)})
    for scheme, bits in ((DemoScheme(), 32 * 44 / 4096), (SparseLocoScheme(), 64 * 14 / 4096)):
        coding = SparseCoding(layout, scheme, 64)
        size = sum(coding.message_bytes(i) for i in range(coding.count))
        assert size * 8 / layout.numel == pytest.approx(bits, rel=1e-3)


def test_slices_hold_whole_parameters_unless_one_is_too_large(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = SparseCoding(LAYOUT, SCHEMES["demo"], 64)
    assert [piece.span for cut in whole.slices for piece in cut] == [
        slice(slot.offset, slot.offset + slot.numel) for slot in LAYOUT.slots.values()
    ]
    monkeypatch.setattr(sparse, "SLICE_VALUES_MAX", 20_000)
    monkeypatch.setattr(dense, "SLICE_VALUES_MAX", 20_000)
    cut = SparseCoding(LAYOUT, SCHEMES["demo"], 64)
    spans = [piece.span for group in cut.slices for piece in group]
    assert spans[0] == slice(0, 2 * 64 * 128)  # two rows of tiles
    assert all(a.stop == b.start for a, b in itertools.pairwise(spans))
    assert spans[-1].stop == LAYOUT.numel
    assert all(sum(p.tiling.numel for p in group) <= 20_000 for group in cut.slices)


def test_cutting_a_parameter_does_not_change_demo(monkeypatch: pytest.MonkeyPatch) -> None:
    products = [[torch.randn(LAYOUT.numel) for _ in range(2)] for _ in range(3)]
    states = []
    for most in (1 << 21, 9000):
        monkeypatch.setattr(sparse, "SLICE_VALUES_MAX", most)
        rounds = Rounds(lambda: strategy("demo"), torch.ones(LAYOUT.numel), peers=2)
        for pair in products:
            rounds.exchange(pair, lr=1e-2)
        states.append(rounds.tensors[0])
    assert torch.equal(*states)


@pytest.mark.parametrize("name", SCHEMES)
def test_memory_holds_what_was_not_sent_and_restored_messages(name: str) -> None:
    scheme = replace(SCHEMES[name], **{"decay" if name == "demo" else "ef_decay": 1.0})  # type: ignore[type-var]
    sender = strategy(name)
    sender.scheme = sender._coding.scheme = scheme
    round_info = Rounds(lambda: sender, torch.zeros(1), peers=1).round_info(lr=1.0)
    coding = sender.coding(round_info, [])
    heard, asked = torch.zeros(LAYOUT.numel), torch.zeros(LAYOUT.numel)
    for number in range(4):
        product = torch.randn(LAYOUT.numel)
        messages, _ = encoded(sender, round_info, coding, product)
        asked += product
        if number == 2:
            sender.restore_residual(round_info, coding, messages)
        else:
            heard += decoded(coding, messages, LAYOUT.numel)
        assert torch.allclose(heard + sender._memory, asked, rtol=0, atol=2e-6)
    assert float(heard.norm()) > 0


@pytest.mark.parametrize("name", SCHEMES)
def test_an_owner_cannot_change_forwarded_messages(name: str) -> None:
    sender = strategy(name)
    round_info = Rounds(lambda: sender, torch.zeros(1), peers=1).round_info(lr=1.0)
    coding = sender.coding(round_info, [])
    sent = [encoded(sender, round_info, coding, torch.randn(LAYOUT.numel)) for _ in range(3)]
    messages, weights = [m[0] for m, _ in sent], [0.5, 0.25, 0.25]
    claims = [
        Sent(blake3(m.numpy().tobytes()).digest(), s[0], w)
        for m, (_, s), w in zip(messages, sent, weights, strict=True)
    ]
    result = coding.merge(0, messages, weights)
    coding.check_result([0], [result], claims)
    with pytest.raises(ProtocolViolation, match="weighs"):
        coding.check_result([0], [coding.merge(0, messages, [0.25, 0.5, 0.25])], claims)
    with pytest.raises(ProtocolViolation, match="not committed"):
        coding.check_result([0], [coding.merge(0, [messages[1], messages[0], messages[2]], weights)], claims)
    with pytest.raises(ProtocolViolation, match="weighs"):
        coding.check_result([0], [coding.merge(0, messages[:2], weights[:2])], claims)
    with pytest.raises(ProtocolViolation, match="norm"):
        coding.check_result([0], [result], [replace(claims[0], sqnorm=claims[0].sqnorm * 1.1), *claims[1:]])
    with pytest.raises(ProtocolViolation, match="bytes instead"):
        coding.check_result([0], [result[:-1]], claims)


@settings(max_examples=150, deadline=None)
@given(st.data(), st.sampled_from([DemoScheme(topk=3), SparseLocoScheme(topk=4), SparseLocoScheme(topk=4, bins=None)]))
def test_any_bytes_decode_or_are_refused(data: st.DataObject, scheme: Scheme) -> None:
    coding = SparseCoding(SMALL, scheme, 4)
    size = coding.result_bytes(0, 2)
    raw = bytearray(data.draw(st.binary(min_size=size, max_size=size)))
    if data.draw(st.booleans()):  # let the senders' part be right, to reach what lies below
        raw[:24] = coding.merge(0, [bytes(valid(coding))] * 2, [0.5, 0.5])[:24].numpy().tobytes()
    if data.draw(st.booleans()):
        message = valid(coding)
        where = data.draw(st.integers(0, len(message) - 1))
        message[where] ^= data.draw(st.integers(1, 255))
        raw[24:] = message + valid(coding)
    try:
        updates = list(coding.updates(0, bytes(raw)))
    except ProtocolViolation:
        return
    assert sum(len(update) for _, update in updates) == SMALL.numel
    assert all(bool(torch.isfinite(update).all()) for _, update in updates)


def valid(coding: SparseCoding) -> bytearray:
    memory = torch.sin(torch.arange(float(SMALL.numel)))
    taken = [coding.scheme.take(memory[piece.span], piece.tiling) for piece in coding.slices[0]]
    quantized = tuple(q for _, q in taken if q is not None)
    message = Sparse(tuple(part for part, _ in taken), quantized or None)
    return bytearray(coding.packings[0].pack(message).numpy().tobytes())
