"""Tensor and sequence parallelism of the decoder, by torch's own styles.

Between attention and MLP each rank has T / tensor tokens of every sequence; within them it has all tokens, and its
share of the heads or of the MLP's columns. The head is cut by the vocabulary.
"""

from __future__ import annotations

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from peer.model.decoder import Decoder


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Cut the parameters of the whole `model` over `mesh`; its hidden state is then a DTensor, cut by tokens."""
    ends: dict[str, ParallelStyle] = {
        "embed_tokens": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
    }
    if model.lm_head is not None:
        ends["lm_head"] = ColwiseParallel()  # for its cut: the loss takes the weights themselves
    parallelize_module(model, mesh, ends)
    for block in model.layers.values():
        parallelize_module(block, mesh, _block_plan(model))


def _block_plan(model: Decoder) -> dict[str, ParallelStyle]:
    plan: dict[str, ParallelStyle] = {
        "input_layernorm": SequenceParallel(),
        "self_attn": PrepareModuleInput(
            input_layouts=(Shard(1), None, None), desired_input_layouts=(Replicate(), None, None)
        ),
        "self_attn.q_proj": ColwiseParallel(),
        "self_attn.k_proj": ColwiseParallel(),
        "self_attn.v_proj": ColwiseParallel(),
        "self_attn.o_proj": RowwiseParallel(output_layouts=Shard(1)),
        "post_attention_layernorm": SequenceParallel(),
        "mlp": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "mlp.gate_proj": ColwiseParallel(),
        "mlp.up_proj": ColwiseParallel(),
        "mlp.down_proj": RowwiseParallel(output_layouts=Shard(1)),
    }
    if model.config.qk_norm:  # (B, T, H, D): cut by heads
        plan["self_attn.q_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
        plan["self_attn.k_norm"] = SequenceParallel(sequence_dim=2, use_local_output=True)
    return plan


def tensor_dims(model: Decoder) -> dict[str, int | None]:
    """Return the dimension along which each parameter is cut, by canonical name; None where it is not."""
    found: dict[str, int | None] = {}
    for name, parameter in model.canonical_parameters():
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        found[name] = next((placement.dim for placement in placements if isinstance(placement, Shard)), None)
    return found
