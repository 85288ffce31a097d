"""The stored form of a checkpoint's parameters (`peer.footprint.stored`), quantized by bitsandbytes' kernels.

What bitsandbytes has quantized and saved already keeps its codes. Scales that are quantized once more (QLoRA's double
quantization) are decoded, so there is one form to send, hash and compute with.
"""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, Final

import msgspec
import torch
from torch import Tensor

from peer.config import HiddenType, ModelConfig, Quantization
from peer.decoding import MALFORMED, decode_json
from peer.errors import CheckpointError, ConfigError
from peer.footprint.parameters import Shape, parameter_shapes
from peer.footprint.stored import NF4_BLOCK, StoredTensor, StoredType, scales_name, stored_tensors
from peer.model.parameter_files import ParameterFiles
from peer.plain_text import plain

STORED_TYPES: Final[dict[StoredType, torch.dtype]] = {
    "F32": torch.float32,
    "BF16": torch.bfloat16,
    "I8": torch.int8,
    "U8": torch.uint8,
}
CODES: Final[dict[Quantization, torch.dtype]] = {"int8": torch.int8, "nf4": torch.uint8}
_STATE: Final = ".quant_state.bitsandbytes__"
_STATE_BYTES_MAX: Final = 1 << 12
_NESTED_BLOCK: Final = 256


class _SavedState(msgspec.Struct):
    """What bitsandbytes saves of a 4-bit matrix beside its tensors, as far as it counts here."""

    quant_type: str
    blocksize: int
    shape: tuple[int, ...]
    nested_blocksize: int | None = None
    nested_offset: float | None = None


def quantized(matrix: Tensor, quantization: Quantization) -> tuple[Tensor, Tensor]:
    """Return the codes and the scales, fp32, of a matrix (rows, columns) of a floating type.

    int8: codes (rows, columns) int8, scales (rows,), of the matrix in fp16, as `bitsandbytes.nn.Linear8bitLt` rounds
    it. nf4: two codes a byte, (numel / 2, 1) uint8, scales (numel / `NF4_BLOCK`,)."""
    functional = bitsandbytes(f"--quantize {quantization}").functional
    if quantization == "int8":
        codes, scales, _ = functional.int8_vectorwise_quant(matrix.half())
        return codes.masked_fill_(scales.unsqueeze(1) == 0, 0), scales  # it divides by the scale
    codes, state = functional.quantize_4bit(matrix.contiguous(), blocksize=NF4_BLOCK, quant_type="nf4")
    return codes, state.absmax


def stored_values(
    files: ParameterFiles,
    model: ModelConfig,
    blocks: range,
    dtype: HiddenType,
    quantization: Quantization,
) -> Iterator[tuple[StoredTensor, Tensor]]:
    """Yield what is stored of some blocks of a checkpoint in a quantized model, one parameter at a time in memory.
    Raises CheckpointError for parameters that do not fit, ConfigError where the model cannot be quantized so."""
    stored = list(stored_tensors(model, blocks, dtype, quantization))
    for name, shape in parameter_shapes(model, blocks):
        parts = [tensor for tensor in stored if tensor.of == name]
        found = _parameter(files, name, shape, quantization if len(parts) > 1 else None)
        for tensor, values in zip(parts, found, strict=True):
            if values.is_floating_point() and not bool(torch.isfinite(values.float()).all()):
                raise CheckpointError(f"{tensor.name} holds NaN or infinity: take another checkpoint")
            yield tensor, values.to(STORED_TYPES[tensor.type]).contiguous().view(tensor.shape)


def _parameter(files: ParameterFiles, name: str, shape: Shape, quantization: Quantization | None) -> tuple[Tensor, ...]:
    """Return a parameter, or its codes and its scales."""
    value = files.tensor(name)
    is_float = value.is_floating_point()
    if is_float and tuple(value.shape) != shape:
        raise CheckpointError(f"{name} has shape {tuple(value.shape)}, not {shape}: use the matching config.json")
    if quantization is None:
        if not is_float:
            kind = str(value.dtype).removeprefix("torch.")
            raise CheckpointError(f"{name} is of the type {kind}: only matrices inside of blocks may be quantized")
        return (value,)
    if is_float:
        if not bool(torch.isfinite(value.float()).all()):
            raise CheckpointError(f"{name} holds NaN or infinity: take another checkpoint")
        return quantized(value, quantization)
    if value.dtype != CODES[quantization]:
        kind = str(value.dtype).removeprefix("torch.")
        raise CheckpointError(f"{name} is of the type {kind}, which is not {quantization}: take another checkpoint")
    return _saved_int8(files, name, shape, value) if quantization == "int8" else _saved_nf4(files, name, shape, value)


def _saved_int8(files: ParameterFiles, name: str, shape: Shape, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix that bitsandbytes has saved in int8."""
    scales = files.tensor(scales_name(name, "int8"))
    _fit(name, codes, shape)
    _fit(scales_name(name, "int8"), scales, shape[:1])
    return codes, scales.float()


def _saved_nf4(files: ParameterFiles, name: str, shape: Shape, codes: Tensor) -> tuple[Tensor, Tensor]:
    """Return a matrix that bitsandbytes has saved in 4 bits, with scales in fp32 or quantized once more."""
    state = _state(files, name)
    if (state.quant_type, state.blocksize) != ("nf4", NF4_BLOCK) or state.shape != shape:
        raise CheckpointError(
            f"{name} is quantized as {plain(state.quant_type, 8)} in blocks of {state.blocksize}, of shape"
            f" {state.shape}: take a checkpoint in nf4 with blocks of {NF4_BLOCK}, or one that is not"
            " quantized"
        )
    size = math.prod(shape)
    _fit(name, codes, (size // 2, 1))
    scales = files.tensor(f"{name}.absmax")
    _fit(f"{name}.absmax", scales, (size // NF4_BLOCK,))
    if state.nested_blocksize is None:
        return codes, scales.float()
    outer, table = files.tensor(f"{name}.nested_absmax"), files.tensor(f"{name}.nested_quant_map")
    if state.nested_blocksize != _NESTED_BLOCK or scales.dtype != torch.uint8:
        raise CheckpointError(f"{name}.absmax has blocks of {state.nested_blocksize}: save it again with bitsandbytes")
    _fit(f"{name}.nested_absmax", outer, (-(-len(scales) // _NESTED_BLOCK),))
    _fit(f"{name}.nested_quant_map", table, (256,))
    steps = outer.float().repeat_interleave(_NESTED_BLOCK)[: len(scales)]
    return codes, table.float()[scales.long()] * steps + (state.nested_offset or 0.0)


def _state(files: ParameterFiles, name: str) -> _SavedState:
    saved = next((held for held in files.names if held.startswith(name + _STATE)), None)
    if saved is None:
        raise CheckpointError(f"{name} has no {_STATE.removeprefix('.')}...: save it again with bitsandbytes")
    content = files.tensor(saved)
    if content.dtype != torch.uint8 or content.numel() > _STATE_BYTES_MAX:
        raise CheckpointError(f"{saved} is no text: save the checkpoint again with bitsandbytes")
    try:
        state: _SavedState = decode_json(bytes(content.flatten().tolist()), _SavedState)
    except MALFORMED as error:
        raise CheckpointError(f"{saved} is malformed ({error}): save the checkpoint again with bitsandbytes") from error
    return state


def _fit(name: str, tensor: Tensor, shape: Shape) -> None:
    if tuple(tensor.shape) != shape:
        raise CheckpointError(f"{name} has shape {tuple(tensor.shape)}, not {shape}: use the matching config.json")


def bitsandbytes(wanted_by: str) -> Any:
    """Import bitsandbytes, only where it is used. Raises ConfigError if it is not installed."""
    compiler = torch.compile
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # it warns on every machine without a GPU
            torch.compile = partial(_compiled_when_called, compiler)
            return importlib.import_module("bitsandbytes")
    except ImportError:
        raise ConfigError(f"{wanted_by} needs bitsandbytes: pip install bitsandbytes") from None
    finally:
        torch.compile = compiler


def _compiled_when_called(compiler: Any, function: Any = None, **options: Any) -> Callable[..., Any]:
    """Compile a function at its first call; without one, return a decorator, as `torch.compile` does. bitsandbytes
    compiles what it has for machines without kernels as it is imported: most never call that, and the compiler's own
    import takes over 2 s of a processor."""
    if function is None:
        return partial(_compiled_when_called, compiler, **options)
    compiled = cache(lambda: compiler(function, **options))
    return lambda *arguments, **named: compiled()(*arguments, **named)
