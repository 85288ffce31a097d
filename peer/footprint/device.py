"""The bytes of training on one device, as today's worker takes them: one inner batch is on it at once.

What autograd saves of a block is counted tensor by tensor (`peer.model.decoder`); tests compare it with what torch
saves. B/P below means bytes a parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

from peer.footprint.optimizer_state import state_bytes
from peer.footprint.workload import FLOAT_BYTES, DeviceKind, Workload

CONTEXT_BYTES: Final[Mapping[DeviceKind, float]] = {"cpu": 0.0, "cuda": 0.8e9, "mps": 0.5e9}
"""What the device's libraries take before any tensor is there. Of GPUs an estimate."""
FRAGMENTATION: Final[Mapping[DeviceKind, float]] = {"cpu": 0.0, "cuda": 0.05, "mps": 0.05}
"""The share of all tensors that an allocator holds beside them. Of GPUs an estimate."""
_TOKEN_BYTES: Final = 8  # int64


def device_items(work: Workload) -> dict[str, float]:
    """Return the bytes on one device at the peak of a step, by item."""
    parts, vector = work.layout.parts, float(work.vector_bytes)
    items = {
        "weights": vector / parts,
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
    if work.layout.shard > 1:
        items["gathered blocks"] = 2 * _block_bytes(work) / work.layout.tensor
    items["rotary table"] = float(FLOAT_BYTES * work.model.max_seq_len * work.model.head_size)
    items |= _step_items(work)
    items["context"] = CONTEXT_BYTES[work.device]
    items["fragmentation"] = FRAGMENTATION[work.device] * sum(items.values())
    return {name: size for name, size in items.items() if size}


def _step_items(work: Workload) -> dict[str, float]:
    """Return what a step and a validation take beside the state; of the two, which never meet, the larger one."""
    tensor = work.layout.tensor
    step = {
        "bf16 copies of weights": _cast_bytes(work) / work.layout.parts if work.bf16 else 0.0,
        "activations": work.tokens * saved_bytes_a_token(work) / tensor,
        "logits and head": _head_bytes(work) if work.has_head else 0.0,
    }
    if work.is_stage:
        return step
    logits = 2.0 * FLOAT_BYTES * work.model.vocab_size * work.tokens  # and their log-probabilities
    validation = {"weights kept while validating": float(work.vector_bytes) / work.layout.parts, "logits": logits}
    return max(step, validation, key=lambda items: sum(items.values()))


def saved_bytes_a_token(work: Workload) -> float:
    """Return the bytes that a token's forward pass through the blocks, and the final norm, keeps for the backward."""
    ends = (work.blocks.start == 0) * _TOKEN_BYTES + work.has_head * _final_bytes_a_token(work)
    return ends + len(work.blocks) * block_bytes_a_token(work)


def block_bytes_a_token(work: Workload) -> float:
    """Return the bytes of a token that one block keeps: inputs, normalized values and outputs of both norms, q, k, v,
    the attention's output twice, and four vectors of the MLP. With autocast the inputs of each product are cast for it
    alone: three for q, k and v, two for gate and up."""
    model, narrow = work.model, 2 if work.bf16 else FLOAT_BYTES
    query, key = model.heads * model.head_size, model.kv_heads * model.head_size
    norms = (4 if work.bf16 else 6) * FLOAT_BYTES * model.hidden_size + 2 * FLOAT_BYTES
    inputs = 5 * narrow * model.hidden_size if work.bf16 else 0
    attention = narrow * (3 * query + 2 * key) + FLOAT_BYTES * model.heads
    mlp = 4 * narrow * model.intermediate_size
    head_norms = model.qk_norm * FLOAT_BYTES * (2 * (query + key) + model.heads + model.kv_heads)
    return norms + inputs + attention + mlp + head_norms


def _final_bytes_a_token(work: Workload) -> float:
    norm = (2 * FLOAT_BYTES + 2) if work.bf16 else 3 * FLOAT_BYTES
    return norm * work.model.hidden_size + FLOAT_BYTES


def _head_bytes(work: Workload) -> float:
    """Return what the head and the loss take beside the activations, at the largest of two moments: the gradient of
    the logits is made of that of their log-probabilities, with these still there; or the gradient of the head's weights
    is made of it."""
    logits = float(FLOAT_BYTES * work.model.vocab_size * work.tokens)
    weights = float(FLOAT_BYTES * work.model.vocab_size * work.model.hidden_size)
    return max(3 * logits, logits + weights) + _TOKEN_BYTES * work.tokens


def _cast_bytes(work: Workload) -> float:
    """Return the bf16 copies of all matrices that autocast keeps until the backward ends. Lookups need none."""
    shapes = [shape for name, shape in work.shapes if len(shape) == 2 and "embed_tokens" not in name]
    tied = work.has_head and work.model.tie_embeddings
    return 2.0 * (sum(map(math.prod, shapes)) + tied * work.model.vocab_size * work.model.hidden_size)


def _block_bytes(work: Workload) -> float:
    """Return one block's parameters in the type of the products."""
    first = f"model.layers.{work.blocks.start - work.blocks.start % work.model.shared_blocks}."
    return (2.0 if work.bf16 else 4.0) * sum(math.prod(shape) for name, shape in work.shapes if name.startswith(first))
