"""Calls of the C functions, by tensors. The torch code stays the reference: it runs where there are none, and where
they refuse a vector, to say why."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from ctypes import POINTER, byref, c_double, c_float, c_int, c_int64, c_void_p
from pathlib import Path
from typing import Any, Final, Protocol

import torch

from peer.native import open_library

_ARGUMENTS: Final[dict[str, list[Any]]] = {
    "encode": [c_void_p, c_int64, c_void_p, POINTER(c_double)],
    "decode": [c_void_p, c_int64, c_void_p],
    "sqnorm": [c_void_p, c_int64, POINTER(c_double)],
    "merge": [POINTER(c_void_p), POINTER(c_float), c_int64, c_int64, c_void_p],
    "step": [c_void_p, *[c_int64] * 3, c_float, c_float, c_int, *[c_void_p] * 4],
}
_CODECS: Final = ("int8", "int4", "two_bit", "fp16", "bf16", "fp32")


class StepRule(Protocol):
    """The factors of an outer step, as `DilocoOuter` has them."""

    @property
    def lr(self) -> float: ...
    @property
    def momentum(self) -> float: ...
    @property
    def nesterov(self) -> bool: ...


class CodecKernels:
    """The kernels of one codec. Tensors are as `kernels_for` wants them, and of the lengths that the codec gives.

    None or False: refused. The torch code then raises `ProtocolViolation`, with its reason; what is written may be
    partly written."""

    def __init__(self, library: ctypes.CDLL, codec: str) -> None:
        """AttributeError if the library has no such kernels."""
        self._calls: dict[str, Any] = {}
        for name, arguments in _ARGUMENTS.items():
            call = library[f"{codec}_{name}"]
            call.argtypes, call.restype = arguments, c_int
            self._calls[name] = call

    def encode(self, x: torch.Tensor, out: torch.Tensor, measure: bool) -> float | None:
        """Encode x (n,) fp32 into `out`, uint8. Return the squared norm of what that decodes to, 0 without
        `measure`."""
        sqnorm = c_double()
        target = byref(sqnorm) if measure else None
        refused = self._calls["encode"](x.data_ptr(), x.numel(), out.data_ptr(), target)
        return None if refused else sqnorm.value

    def decode(self, data: torch.Tensor, out: torch.Tensor) -> bool:
        """Decode uint8 into `out` (n,) fp32."""
        return not self._calls["decode"](data.data_ptr(), out.numel(), out.data_ptr())

    def sqnorm(self, data: torch.Tensor, numel: int) -> float | None:
        """Return the squared norm of the decoded values."""
        sqnorm = c_double()
        refused = self._calls["sqnorm"](data.data_ptr(), numel, byref(sqnorm))
        return None if refused else sqnorm.value

    def merge(self, messages: Sequence[torch.Tensor], weights: Sequence[float], numel: int, out: torch.Tensor) -> bool:
        """Encode the sum of weight * decoded over the messages, in the order given, into `out`: uint8 like each."""
        pointers = (c_void_p * len(messages))(*(message.data_ptr() for message in messages))
        factors = (c_float * len(weights))(*weights)  # torch, too, rounds a factor to fp32
        return not self._calls["merge"](pointers, factors, len(messages), numel, out.data_ptr())

    def step(
        self,
        data: torch.Tensor,
        numel: int,
        first: int,
        rule: StepRule,
        before: Sequence[torch.Tensor],
        after: Sequence[torch.Tensor],
    ) -> bool:
        """Make the outer step of `DilocoOuter` on n values of an encoded update of `numel`, from its value `first` on.

        `before`, `after`: weights and velocity (n,) fp32; they may be the same."""
        vectors = [vector.data_ptr() for vector in (*before, *after)]
        factors = rule.lr, rule.momentum, rule.nesterov
        return not self._calls["step"](data.data_ptr(), numel, first, before[0].numel(), *factors, *vectors)


def _load() -> dict[str, CodecKernels]:
    """Return the kernels of each codec, by its name; none if the library is not there or lacks one of the functions."""
    library = open_library(Path(__file__).parent, "_codecs")
    try:
        return {} if library is None else {codec: CodecKernels(library, codec) for codec in _CODECS}
    except AttributeError:
        return {}


KERNELS: Final = _load()


def kernels_for(codec: str, *tensors: torch.Tensor) -> CodecKernels | None:
    """Return the kernels of the codec of that name. None if there are none, or if a tensor is not in this machine's
    memory, contiguous, and uint8 or fp32."""
    kernels = KERNELS.get(codec)
    return kernels if kernels is not None and all(map(_is_plain, tensors)) else None


def _is_plain(tensor: torch.Tensor) -> bool:
    plain_type = tensor.dtype in (torch.uint8, torch.float32)
    return plain_type and tensor.device.type == "cpu" and tensor.is_contiguous()
