"""Hidden states as bytes on the wire, and back: rows of fp32, bf16 or int8.

A row stands alone, so that a part of what was sent can be sent again. In int8 each 256 values of a row have a scale of
their own (LLM.int8, 2208.07339: a few channels of a model are far larger than the others, and take the precision of
what shares their scale).
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from peer.config import HiddenType
from peer.ipc.block_messages import GROUP, WireType, row_bytes

TYPES: Final[dict[HiddenType, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LARGEST: Final = torch.finfo(torch.bfloat16).max  # of any type: what is finite stays so


def rows_to(hidden: Tensor, wire: WireType | None) -> memoryview:
    """Return the bytes of hidden states (count, C) of finite values; None: in the type that they have."""
    if wire == "int8":
        return _bytes_of(_to_int8(hidden.float().clamp(-_LARGEST, _LARGEST)))
    if wire == "bf16" and hidden.dtype != torch.bfloat16:
        hidden = hidden.clamp(-_LARGEST, _LARGEST)
    return _bytes_of(hidden if wire is None else hidden.to(TYPES[wire]))


def rows_from(payload: memoryview, width: int, wire: WireType, dtype: torch.dtype) -> Tensor:
    """Return a copy of the hidden states (count, C) in `payload`, whole rows of `width` values. Values that are not
    finite on the wire stay so."""
    raw = torch.frombuffer(payload, dtype=torch.uint8)
    if wire == "int8":
        return _from_int8(raw.view(-1, row_bytes(width, wire)), width).to(dtype)
    return raw.clone().view(TYPES[wire]).view(-1, width).to(dtype)


def _to_int8(hidden: Tensor) -> Tensor:
    """Return rows (count, bytes) of fp32 values (count, C)."""
    count, width = hidden.shape
    groups = -(-width // GROUP)
    values = torch.nn.functional.pad(hidden, (0, groups * GROUP - width)).view(count, groups, GROUP)
    scales = values.abs().amax(2) / 127  # (count, groups)
    steps = scales.clamp(min=torch.finfo(torch.float32).tiny).unsqueeze(2)
    whole = (values / steps).round().clamp(-127, 127).to(torch.int8).view(count, groups * GROUP)[:, :width]
    return torch.cat([scales.view(torch.uint8), whole.contiguous().view(torch.uint8)], 1)


def _from_int8(rows: Tensor, width: int) -> Tensor:
    """Return the fp32 values (count, C) of rows (count, bytes)."""
    groups = -(-width // GROUP)
    scales = rows[:, : 4 * groups].reshape(-1).clone().view(torch.float32).view(-1, groups)
    return rows[:, 4 * groups :].view(torch.int8) * scales.repeat_interleave(GROUP, 1)[:, :width]


def _bytes_of(rows: Tensor) -> memoryview:
    array: Any = rows.contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)
