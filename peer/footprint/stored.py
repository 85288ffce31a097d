"""A served model's weights as they are stored, sent and held: names, types and sizes, plain or quantized.

Quantized are the matrices inside of blocks; embedding, head, gains and biases keep their type.

int8: of each matrix (rows, columns) one byte a value, with an fp32 scale for each row, as in LLM.int8() (arXiv
2208.07339) without its outliers. nf4: half a byte a value, with an fp32 scale for each `NF4_BLOCK` values of the flat
matrix (QLoRA, arXiv 2305.14314), so 4.5 bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from peer.config import HiddenType, ModelConfig, Quantization, StorageConfig
from peer.errors import ConfigError
from peer.footprint.optimizer_state import is_inner_matrix
from peer.footprint.parameters import EMBEDDING, Shape, base_of, frozen_shapes, parameter_shapes

StoredType = Literal["F32", "BF16", "I8", "U8"]
"""As safetensors names them."""
NF4_BLOCK: Final = 64
_FLOATS: Final[dict[HiddenType, StoredType]] = {"fp32": "F32", "bf16": "BF16"}
_BYTES: Final[dict[StoredType, int]] = {"F32": 4, "BF16": 2, "I8": 1, "U8": 1}
_SCALES: Final[dict[Quantization, str]] = {"int8": ".SCB", "nf4": ".weight.absmax"}  # bitsandbytes' names


@dataclass(frozen=True)
class StoredTensor:
    """A tensor of a file of weights. `of`: the parameter that it belongs to."""

    name: str
    type: StoredType
    shape: Shape
    of: str

    @property
    def size_bytes(self) -> int:
        return math.prod(self.shape) * _BYTES[self.type]


def stored_tensors(
    model: ModelConfig, blocks: range | None, dtype: HiddenType, quantization: Quantization | None
) -> Iterator[StoredTensor]:
    """Yield what is stored of some blocks (None: the whole model), in order. Raises ConfigError if the model cannot be
    quantized so."""
    for name, shape in parameter_shapes(model, blocks):
        if quantization is None or not is_quantized(name, shape):
            yield StoredTensor(name, _FLOATS[dtype], shape, name)
        elif quantization == "int8":
            yield StoredTensor(name, "I8", shape, name)
            yield StoredTensor(scales_name(name, quantization), "F32", shape[:1], name)
        else:
            size = math.prod(shape)
            if size % NF4_BLOCK or shape[1] % 2:
                raise ConfigError(
                    f"nf4 has blocks of {NF4_BLOCK} values, and {name} has shape {shape}: serve this model in int8"
                )
            yield StoredTensor(name, "U8", (size // 2, 1), name)
            yield StoredTensor(scales_name(name, quantization), "F32", (size // NF4_BLOCK,), name)


def stored_bytes(model: ModelConfig, blocks: range | None, dtype: HiddenType, quantization: Quantization | None) -> int:
    """Return the size of some blocks' weights (None: of the whole model's)."""
    return sum(stored.size_bytes for stored in stored_tensors(model, blocks, dtype, quantization))


def frozen_bytes(model: ModelConfig, blocks: range, form: StorageConfig) -> int:
    """Return the size of the base that a stage of these blocks keeps beside its adapter."""
    size = stored_bytes(base_of(model), blocks, form.dtype, form.quantization)
    again = [shape for name, shape in frozen_shapes(model, blocks) if name == EMBEDDING and blocks.start > 0]
    return size + sum(_BYTES[_FLOATS[form.dtype]] * math.prod(shape) for shape in again)


def is_quantized(name: str, shape: Shape) -> bool:
    """Whether a quantized model has this parameter in codes."""
    return is_inner_matrix(name, shape)


def scales_name(name: str, quantization: Quantization) -> str:
    """Return the name of a quantized parameter's scales."""
    return name.removesuffix(".weight") + _SCALES[quantization]
