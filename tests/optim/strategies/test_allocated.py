"""L-GreCo's messages: parts of layers, and error feedback."""

from __future__ import annotations

import pytest
import torch

from optim.codecs import get_codec
from optim.codecs.mixed import CODES, MixedCode
from optim.strategies.allocated import AllocatedCoding, AllocatedFormat
from tests.optim.support.layouts import layout_of

LAYOUT = layout_of(
    {
        "embed": torch.zeros(512, 256),
        "a.gain": torch.zeros(256),
        "a.w": torch.zeros(100, 300),
        "b.w": torch.zeros(256, 256),
        "norm": torch.zeros(256),
    }
)
N = LAYOUT.numel
FP32 = get_codec("fp32")


def wire(places: list[list[slice]] | None = None, bits: float = 3.0) -> AllocatedFormat:
    return AllocatedFormat(LAYOUT, places or [[slice(0, N)]], FP32, bits)


def coded(used: AllocatedFormat, vector: torch.Tensor) -> tuple[list[torch.Tensor], torch.Tensor]:
    """The messages, and what they say, decoded from what an owner makes of them."""
    coding = used.coding(0, torch.zeros(0))
    out = [torch.empty(coding.message_bytes(i), dtype=torch.uint8) for i in range(coding.count)]
    used.encode(coding, vector, out)
    heard = torch.zeros(N)
    for index, message in enumerate(out):
        for place, update in coding.updates(index, coding.merge(index, [message], [1.0])):
            heard[place] = update
    return out, heard


def parts(coding: AllocatedCoding) -> list[tuple[int, int]]:
    """Where each part begins and ends in the message."""
    found = []
    for index in range(coding.count):
        code, at = coding.code(index), coding.span(index).start
        assert isinstance(code, MixedCode) and sum(code.lengths) == coding.size(index)
        for length in code.lengths:
            found.append((at, at + length))
            at += length
    return found


@pytest.mark.parametrize("half", [False, True])
def test_no_part_has_values_of_two_layers(half: bool) -> None:
    places = [[slice(0, 65_536), slice(131_328, N)], [slice(65_536, 131_328)]] if half else [[slice(0, N)]]
    for fragment in places:
        coding = AllocatedCoding(LAYOUT, fragment, FP32, 3.0)
        flat = torch.cat([torch.arange(place.start, place.stop) for place in fragment])
        owners = torch.zeros(N, dtype=torch.int64)
        for number, slot in enumerate(LAYOUT.slots.values()):
            owners[slot.offset : slot.offset + slot.numel] = number
        cut = parts(coding)
        assert [begin for begin, _ in cut] == [0, *(end for _, end in cut)][:-1] and cut[-1][1] == len(flat)
        for begin, end in cut:
            assert len(set(owners[flat[begin:end]].tolist())) == 1


def test_layers_of_different_size_get_different_codecs() -> None:
    """The middle layer is loud; bits go there, and no message is longer for it."""
    vector = torch.randn(N) * 0.01
    loud = LAYOUT.slots["a.w"]
    vector[loud.offset : loud.offset + loud.numel] *= 100
    used = wire()
    coding = used.coding(0, torch.zeros(0))
    assert isinstance(coding, AllocatedCoding)
    messages, _ = coded(used, vector)
    numbers = [number for i, m in enumerate(messages) for number in m[: len(coding.code(i).lengths)].tolist()]
    chosen = torch.tensor([CODES[number].bits_per_value for number in numbers])
    inside = torch.tensor([loud.offset <= begin < loud.offset + loud.numel for begin, _ in parts(coding)])
    with_loud = torch.tensor([i in (6, 7, 8) for i in range(coding.count) for _ in coding.code(i).lengths])
    assert float(chosen[inside].mean()) > float(chosen[with_loud & ~inside].mean()) + 0.5
    assert len(messages[7]) == pytest.approx(3 * coding.size(7) / 8, abs=1)


@pytest.mark.parametrize("bits", [1.25, 3.0])
def test_decoded_plus_residual_is_the_input(bits: float) -> None:
    used, asked, heard = wire(bits=bits), torch.zeros(N), torch.zeros(N)
    coding = used.coding(0, torch.zeros(0))
    for number in range(5):
        vector = torch.randn(N)
        messages, said = coded(used, vector)
        asked += vector
        if number == 3:
            used.restore_residual(coding, messages)
        else:
            heard += said
        (owed,) = used.memory(coding)
        assert torch.allclose(heard + owed, asked, rtol=0, atol=5e-6)
    assert float(owed.norm()) < 3 * float(vector.norm())  # it does not pile up


def test_more_bits_lose_less() -> None:
    vector = torch.randn(N)
    lost = [float((coded(wire(bits=bits), vector)[1] - vector).norm()) for bits in (1.25, 2.0, 3.0, 4.5, 8.0)]
    assert lost == sorted(lost, reverse=True) and lost[-1] < 0.1 * lost[0]


def test_senders_choose_for_themselves_and_the_mean_is_of_what_they_say() -> None:
    quiet_first = torch.cat([torch.randn(N // 2) * 0.01, torch.randn(N - N // 2)])
    vectors = [quiet_first, quiet_first.flip(0)]
    (first, said), (second, told) = (coded(wire(), vector) for vector in vectors)
    coding, mean = wire().coding(0, torch.zeros(0)), torch.zeros(N)
    assert any(not torch.equal(a[:4], b[:4]) for a, b in zip(first, second, strict=True))
    for index in range(coding.count):
        result = coding.merge(index, [first[index], second[index]], [0.25, 0.75])
        for place, update in coding.updates(index, result):
            mean[place] = update
    assert torch.allclose(mean, 0.25 * said + 0.75 * told, rtol=1e-6, atol=1e-7)
