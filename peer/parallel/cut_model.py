"""A model in parts, one a rank: TP, then FSDP2, over storage that is the rank's own flat vectors.

Imported only where weights are cut: torch's part for it takes a second and tens of megabytes.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from peer.config import ModelConfig
from peer.ipc.span import Span
from peer.model.decoder import Decoder
from peer.model.head_loss import VocabularyPart, head_losses
from peer.model.layout import FlatLayout
from peer.model.rotary import rotary_table
from peer.parallel.loss import StagePass, SummedLoss
from peer.parallel.pieces import LocalPieces
from peer.parallel.ranks import Ranks


class CutLoss(SummedLoss):
    """`SummedLoss` where each rank of the tensor group has some rows of the head. The loss is the same at all."""

    def __init__(self, decoder: Decoder, mesh: DeviceMesh) -> None:
        super().__init__(decoder)
        group = mesh.get_group()
        assert decoder.config.vocab_size % mesh.size() == 0
        self._part = VocabularyPart(
            first=mesh.get_local_rank() * (decoder.config.vocab_size // mesh.size()),
            largest=partial(_reduced, dist.ReduceOp.MAX, group),
            total=partial(_reduced, dist.ReduceOp.SUM, group),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        hidden, head = self.decoder.hidden(self.decoder.inputs_of(tokens)), self.decoder.head
        assert isinstance(hidden, DTensor) and isinstance(head, DTensor)
        gathered = hidden.redistribute(placements=[Replicate()])
        whole = gathered.to_local(grad_placements=[Partial()])  # each rank knows its rows' share of the gradient
        targets, marked = tokens[:, 1:].flatten(), self.decoder.marked
        weight = self.decoder.loss_weight
        total, _ = head_losses(whole.flatten(0, 1), head.to_local(), targets, self._part, marked, weight)
        return total.clone()  # FSDP warns of a view


def _reduced(kind: dist.ReduceOp.RedOpType, group: dist.ProcessGroup, values: Tensor) -> Tensor:
    values = values.contiguous()
    dist.all_reduce(values, kind, group)
    return values


class CutModel:
    """The pieces of this rank, and the `module` that computes with them once they are bound: the loss of a whole model,
    or the pass through the blocks `span`."""

    def __init__(self, config: ModelConfig, ranks: Ranks, narrow: torch.dtype | None, span: Span | None = None) -> None:
        whole, layout = FlatLayout.of(config, span), ranks.layout
        self._decoder = Decoder(config, torch.empty(whole.numel, device="meta"), span)
        self.module: SummedLoss | StagePass = SummedLoss(self._decoder) if span is None else StagePass(self._decoder)
        if layout.tensor > 1:
            mesh = ranks.submesh("tensor")
            apply_tensor_parallel(self._decoder, mesh)
            self.module = CutLoss(self._decoder, mesh)
        self.pieces = LocalPieces.of(whole, tensor_dims(self._decoder), layout, ranks.rank)
        _place_rotary_table(self._decoder, ranks.device)
        if layout.shard > 1:
            self._shard(ranks, narrow)

    def bind(self, weights: Tensor, gradient: Tensor) -> None:
        """Make the parameters' local tensors views into `weights`, those of their gradients views into `gradient`."""
        pieces, views = self.pieces.pieces, self.pieces.layout.views(weights)
        paths = {id(parameter): path for path, parameter in self.module.named_parameters()}
        named = [(name, paths[id(parameter)], parameter) for name, parameter in self._decoder.canonical_parameters()]
        # FSDP computes on the padded piece, of which the parameter is the beginning. It learns the storage from the
        # first assignment, and does not pad a tensor that already lies in it.
        for padded in (True, False):
            state = {
                path: _like(parameter, views[name] if padded else views[name][: len(pieces[name].rows)])
                for name, path, parameter in named
            }
            self.module.load_state_dict(state, assign=True)
        gradients = self.pieces.layout.views(gradient)
        for name, parameter in self._decoder.canonical_parameters():
            assert isinstance(parameter, DTensor)
            assert parameter.to_local().untyped_storage().data_ptr() == weights.untyped_storage().data_ptr(), name
            parameter.grad = _like(parameter, gradients[name][: len(pieces[name].rows)])  # FSDP and autograd add to it

    def release(self) -> None:
        """Give up the weights that a forward pass has gathered. A backward pass does so by itself; without one the root
        would compute on with them after the weights have changed."""
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _shard(self, ranks: Ranks, narrow: torch.dtype | None) -> None:
        """Let each block gather its weights when it computes. They are cast to `narrow` before that; autocast would do
        it after. The embedding stays fp32, and with it the residual stream, as on one device."""
        mesh = ranks.submesh("shard")
        cast = MixedPrecisionPolicy(narrow, torch.float32, cast_forward_inputs=False)
        for block in self._decoder.layers.values():
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy() if narrow is None else cast)
        fully_shard(self.module, mesh=mesh)
        for module in self.module.modules():
            if isinstance(module, FSDPModule):  # each rank's loss is a part of the mean already
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)


def _like(parameter: nn.Parameter, local: Tensor) -> DTensor:
    """Return a DTensor that is cut as `parameter` is, with this local tensor."""
    assert isinstance(parameter, DTensor)
    return DTensor.from_local(
        local,
        parameter.device_mesh,
        parameter.placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _place_rotary_table(decoder: Decoder, device: torch.device) -> None:
    """Compute on the device what a decoder on meta has no values for."""
    cos, sin = rotary_table(decoder.config)
    decoder.cos, decoder.sin = cos.to(device), sin.to(device)


def apply_tensor_parallel(model: Decoder, mesh: DeviceMesh) -> None:
    """Cut the parameters of the whole `model` over `mesh`; its hidden state is then a DTensor, cut by tokens.

    Between attention and MLP each rank has T / tensor tokens of every sequence; within them it has all tokens, and its
    share of the heads or of the MLP's columns. The head is cut by the vocabulary."""
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
