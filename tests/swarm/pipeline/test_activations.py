"""Hidden states as bytes: exact sizes, bounded errors, malformed or infinite data refused."""

from __future__ import annotations

import pytest
import torch

from peer.errors import ProtocolViolation
from swarm.pipeline.activations import ActivationCode, new_payload, view_of
from swarm.pipeline.config import Activations

SHAPES = [(1, 1, 32), (2, 16, 32), (3, 7, 100), (4, 128, 256)]  # the last goes through a thread


def size_of(activations: Activations, n: int) -> int:
    """Derived independently: int8 has 4 bytes a block of 256, int4 2 bytes a block of 128 and half a byte a value,
    padded."""
    if activations == "int8":
        return n + 4 * -(-n // 256)
    if activations == "int4":
        blocks = -(-n // 128)
        return 2 * blocks + 64 * blocks
    return {"fp16": 2, "none": 4}[activations] * n


@pytest.mark.parametrize("activations", ["int8", "int4", "fp16", "none"])
@pytest.mark.parametrize("shape", SHAPES)
async def test_round_trip_error_is_bounded(activations: Activations, shape: tuple[int, ...]) -> None:
    code = ActivationCode(activations)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    payload = new_payload(code.size_bytes(x.numel()))
    assert len(payload) == size_of(activations, x.numel())
    await code.encode(x, payload)
    out = torch.full_like(x, torch.nan)
    await code.decode(view_of(payload), out)
    largest = float(x.abs().max())
    bound = {"int8": largest / 127 / 2 * 1.001, "int4": largest / 7 / 2 * 1.01, "fp16": largest / 2048, "none": 0.0}
    assert float((out - x).abs().max()) <= bound[activations]


async def test_outlier_costs_only_its_own_block() -> None:
    x = torch.full((4, 256), 0.01)
    x[0, 0] = 1000.0
    code = ActivationCode("int8")
    payload = new_payload(code.size_bytes(x.numel()))
    await code.encode(x, payload)
    out = torch.empty_like(x)
    await code.decode(view_of(payload), out)
    assert torch.equal(out[0, 1:], torch.zeros(255)) and float((out[1:] - 0.01).abs().max()) < 1e-6


@pytest.mark.parametrize("activations", ["int8", "int4", "fp16", "none"])
@pytest.mark.parametrize("values", [300, 1 << 15])
async def test_malformed_or_infinite_data_is_refused(activations: Activations, values: int) -> None:
    code = ActivationCode(activations)
    out = torch.empty(values)
    size = code.size_bytes(values)
    for bad in (b"", b"\0" * (size - 1), b"\0" * (size + 1), b"\xff" * size):
        with pytest.raises(ProtocolViolation):
            await code.decode(memoryview(bad), out)
    for wrong in (torch.nan, torch.inf):
        x = torch.zeros(values)
        x[values // 2] = wrong
        with pytest.raises(ProtocolViolation):
            await code.encode(x, new_payload(size))
