"""The bytes of training on one device, with one micro-batch on it at a time.

Autograd's saved tensors of a block are counted one by one (`peer.model.decoder`); tests compare the sum with torch. B/P
below means bytes a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from peer.config import StorageConfig
from peer.footprint.optimizer_state import is_inner_matrix, state_bytes
from peer.footprint.parameters import base_of, parameter_shapes
from peer.footprint.stored import frozen_bytes
from peer.footprint.workload import FLOAT_BYTES, SPLIT_BYTES, DeviceKind, Workload

CONTEXT_BYTES: Final[Mapping[DeviceKind, float]] = {"cpu": 0.0, "cuda": 0.8e9, "mps": 0.5e9}
"""The memory that a device's libraries take before the first tensor. For GPUs an estimate."""
FRAGMENTATION: Final[Mapping[DeviceKind, float]] = {"cpu": 0.0, "cuda": 0.05, "mps": 0.05}
"""The share of all tensors that an allocator holds beside them. Of GPUs an estimate."""
TOKEN_BYTES: Final = 8  # int64
_PART_BYTES: Final = 256 << 20  # of the fp32 logits of one part
_ROWS_MIN: Final = 256  # below it a GPU's products are slow


def part_rows(vocab_size: int) -> int:
    """Return how many tokens' logits exist at a time."""
    return max(_ROWS_MIN, _PART_BYTES // (FLOAT_BYTES * vocab_size))


def device_items(work: Workload) -> dict[str, float]:
    """Return the bytes on one device at the peak of a step, by item."""
    items = _state_items(work) | _step_items(work)
    items["context"] = CONTEXT_BYTES[work.device]
    items["fragmentation"] = FRAGMENTATION[work.device] * sum(items.values())
    return {name: size for name, size in items.items() if size}


def step_bytes(work: Workload) -> float:
    """Return the part of `device_items` that exists only during a step."""
    return (1 + FRAGMENTATION[work.device]) * sum(_step_items(work).values())


def _state_items(work: Workload) -> dict[str, float]:
    """Return what stays between two steps."""
    parts, vector = work.trained_parts, float(work.vector_bytes)
    items = {
        "weights": (float(SPLIT_BYTES * work.parameters) if work.is_split else vector) / parts,
        "gradient": vector / parts,
        "inner optimizer": state_bytes(work.inner.optimizer, work.shapes) / parts,
    }
    if work.exchange.product == "gradient" and not work.is_stage:
        items["sum of gradients"] = vector / parts
    if work.is_stage:
        items["gradients of a micro-batch"] = vector / parts
        items["weights as captured"] = vector / parts
        if work.is_synchronous:
            items["weights of the step before"] = vector / parts
    if work.base is not None:
        items["base"] = frozen_bytes(work.model, work.blocks, work.base) / work.layout.shard
        if work.layout.shard > 1:
            items["gathered base"] = _gathered_bytes(work, work.base)
    elif work.layout.shard > 1:
        items["gathered blocks"] = 2 * _block_bytes(work) / work.layout.tensor
    items["rotary table"] = float(FLOAT_BYTES * work.model.max_seq_len * work.model.head_size)
    return items


def _step_items(work: Workload) -> dict[str, float]:
    """Return what a step takes beside the state. A validation takes less: it keeps nothing for a backward pass."""
    items = {
        f"{'16-bit' if work.narrow else 'fp32'} copies of weights": _cast_bytes(work) / work.trained_parts,
        "activations": work.tokens * saved_bytes_a_token(work) / work.layout.tensor,
        "logits and head": _head_bytes(work) if work.has_head else 0.0,
    }
    if work.base is not None:
        items["matrix being decoded"] = _decoded_bytes(work, work.base)
    if work.recompute != "none":
        items["block being recomputed"] = work.tokens * block_bytes_a_token(work) / work.layout.tensor
    return items


def saved_bytes_a_token(work: Workload) -> float:
    """Return the bytes that a token's forward pass through the blocks, and the final norm, keeps for the backward."""
    ends = (work.blocks.start == 0) * TOKEN_BYTES + work.has_head * _final_bytes_a_token(work)
    kept = {"none": block_bytes_a_token, "selective": _products_bytes_a_token, "full": _input_bytes_a_token}
    return ends + len(work.blocks) * kept[work.recompute](work)


def block_bytes_a_token(work: Workload) -> float:
    """Return the bytes of a token that one block keeps: inputs, normalized values and outputs of both norms, q, k, v,
    the attention's output twice, and four vectors of the MLP. With autocast the inputs of each product are cast for it
    alone: three for q, k and v, two for gate and up."""
    model, width = work.model, 2 if work.narrow else FLOAT_BYTES
    query, key = model.heads * model.head_size, model.kv_heads * model.head_size
    outputs = 0 if work.narrow else 2 * FLOAT_BYTES * model.hidden_size  # cast ones count with the products
    norms = 2 * _norm_bytes(work) + outputs
    inputs = 5 * width * model.hidden_size if work.narrow else 0
    attention = width * (3 * query + 2 * key) + FLOAT_BYTES * model.heads
    mlp = 4 * width * model.intermediate_size
    head_norms = model.qk_norm * FLOAT_BYTES * (2 * (query + key) + model.heads + model.kv_heads)
    return norms + inputs + attention + mlp + head_norms + _adapter_bytes(work)


def _adapter_bytes(work: Workload) -> float:
    """Return what the adapters of a block keep of a token beside their inputs: A's outputs."""
    adapter = work.model.adapter
    return 0.0 if adapter is None else (2.0 if work.narrow else 4.0) * adapter.rank * len(adapter.targets)


def _decoded_bytes(work: Workload, base: StorageConfig) -> float:
    """Return the largest matrix of a base in the type of the products, 0 where all are held in it."""
    if base.quantization is None and _has_type_of_products(work, base):
        return 0.0
    shapes = parameter_shapes(base_of(work.model), work.blocks)
    matrices = (shape for name, shape in shapes if is_inner_matrix(name, shape))
    return (2.0 if work.narrow else 4.0) * max(map(math.prod, matrices))


def _has_type_of_products(work: Workload, base: StorageConfig) -> bool:
    """Whether what is not quantized of a base is held in the type of the products."""
    return (base.dtype == "bf16") == work.narrow


def _input_bytes_a_token(work: Workload) -> float:
    """Return the bytes of a token that a block keeps which is recomputed as a whole: its input."""
    return float(FLOAT_BYTES * work.model.hidden_size)


def _products_bytes_a_token(work: Workload) -> float:
    """Return the bytes of a token kept by a block that recomputes all but matrix products and the attention: its input,
    q, k, v, the attention and its sum of exponentials, and the outputs of the other four products."""
    model, width = work.model, 2 if work.narrow else FLOAT_BYTES
    query, key = model.heads * model.head_size, model.kv_heads * model.head_size
    products = 2 * query + 2 * key + 2 * model.hidden_size + 2 * model.intermediate_size
    return _input_bytes_a_token(work) + width * products + FLOAT_BYTES * model.heads


def _final_bytes_a_token(work: Workload) -> float:
    """Return what the final norm keeps of a token: its input, normalized, and its output, which the loss needs."""
    return _norm_bytes(work) + FLOAT_BYTES * work.model.hidden_size


def _norm_bytes(work: Workload) -> float:
    """Return what a norm keeps of a token: its input, and the normalized one, which CUDA's kernel computes again."""
    return (1 if work.device == "cuda" else 2) * FLOAT_BYTES * work.model.hidden_size + FLOAT_BYTES


def _head_bytes(work: Workload) -> float:
    """Return what the head and the loss take beside the activations: twice the logits of a part, the gradient of the
    hidden state and the targets, and the gradient of the head's weights with what a part adds to it. Autocast adds
    the logits' gradient in 16 bits, and weights held in another type than the products' are cast. Of a head that is
    cut, the hidden state is gathered."""
    tensor, width = work.layout.tensor, 2 if work.narrow else FLOAT_BYTES
    vocabulary, vectors = work.model.vocab_size // tensor, 1 + (tensor > 1)
    rows = min(work.tokens, part_rows(vocabulary))
    logits = (2 * FLOAT_BYTES + 2 * work.narrow) * vocabulary * rows
    weights = (FLOAT_BYTES + width + work.cast_bytes) * vocabulary * work.model.hidden_size
    if work.base is not None:  # it has no gradient
        weights = 0 if _has_type_of_products(work, work.base) else width * vocabulary * work.model.hidden_size
    return float(logits + weights + work.tokens * (vectors * FLOAT_BYTES * work.model.hidden_size + TOKEN_BYTES))


def _gathered_bytes(work: Workload, base: StorageConfig) -> float:
    """Return what is gathered at a time of a base that is cut: two blocks, and all that lies outside of blocks."""
    shapes = [*parameter_shapes(base_of(work.model), work.blocks)]
    blocks = sum(math.prod(shape) for name, shape in shapes if ".layers." in name)
    ends = sum(math.prod(shape) for name, shape in shapes if ".layers." not in name)
    different = len(work.blocks) / work.model.shared_blocks
    return (2.0 if base.dtype == "bf16" else 4.0) * (ends + min(2.0, different) * blocks / different)


def _cast_bytes(work: Workload) -> float:
    """Return the copies of the blocks' matrices in the products' type that exist at a time: all until the backward
    ends, or those of the block that is computed."""
    if work.recompute != "none":
        return float(work.cast_bytes * _block_matrices(work))
    shapes = [shape for name, shape in work.shapes if len(shape) == 2 and ".layers." in name]
    return float(work.cast_bytes * sum(map(math.prod, shapes)))


def _block_bytes(work: Workload) -> float:
    """Return one block's matrices in the type of the products."""
    return (2.0 if work.narrow else 4.0) * _block_matrices(work)


def _block_matrices(work: Workload) -> int:
    """Return the elements of one block's matrices."""
    first = f"model.layers.{work.blocks.start - work.blocks.start % work.model.shared_blocks}."
    return sum(math.prod(shape) for name, shape in work.shapes if len(shape) == 2 and name.startswith(first))
