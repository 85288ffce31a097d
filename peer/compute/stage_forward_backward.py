"""The arithmetic of a stage under one set of weights: hidden states forward, gradients backward.

Shapes: B sequences of this rank, T tokens, C hidden_size, P parameters of the stage, n of them on this rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from peer.compute.activation_store import GraphSize, HeldMicroBatch
from peer.compute.device import Device, narrow_type
from peer.config import InnerConfig, ModelConfig
from peer.errors import StageRefused
from peer.ipc.stage_spec import StageSpec
from peer.model.decoder import Decoder
from peer.model.mixed_precision import autocast
from peer.parallel.ranks import Ranks


class ForwardBackward:
    """The blocks of a `decoder` with its weights `flat` (P fp32, on the device). The caller may change the weights
    while no graph over them is held.

    `graph_bytes` maps the shape of an input to the memory that its graph keeps, measured once.
    """

    def __init__(
        self,
        decoder: Decoder,
        inner: InnerConfig,
        device: Device,
        graph_bytes: dict[torch.Size, int],
        ranks: Ranks,
    ) -> None:
        self.flat = decoder.flat
        self.parameters = [parameter for _, parameter in decoder.canonical_parameters()]
        self.names = [name for name, _ in decoder.canonical_parameters()]
        self.compiled = device.compile
        self._decoder = decoder
        self._hidden: Callable[[Tensor], Tensor] = torch.compile(decoder.hidden) if self.compiled else decoder.hidden
        self._narrow = narrow_type(device, inner)
        self._device = device
        self._is_first = decoder.span.is_first
        self._tells_all = self._narrow == torch.float16 or decoder.config.adapter is not None
        self._graph_bytes = graph_bytes
        self._ranks = ranks

    def run(self, held: HeldMicroBatch, with_graph: bool, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return the stage's output for the held input, and what its backward pass begins with: both the hidden state
        (B, T, C), of the last stage the losses (B, T) and their sum. `scale` is about that of the backward. All ranks
        must call it alike."""
        size = GraphSize([self.flat, *self._decoder.parameters()])
        measured = size.measured() if with_graph and held.x.shape not in self._graph_bytes else nullcontext()
        if with_graph and not self._is_first:
            held.x.requires_grad_()
        self._decoder.loss_weight, self._decoder.samples = scale, held.samples
        with torch.set_grad_enabled(with_graph), measured, autocast(self._device.torch, self._narrow):
            hidden = self._hidden(held.x)
            targets = held.counted_targets
            if targets is None:
                out = root = hidden.float()
            else:
                root, out = self._decoder.losses(hidden[: len(targets)], targets)
        if with_graph and held.x.shape not in self._graph_bytes:
            (total,) = self._ranks.sum((size.size_bytes,))  # all ranks refuse the same micro-batches
            self._graph_bytes[held.x.shape] = int(total / self._ranks.layout.size)
        return out, root

    def gradients(
        self, held: HeldMicroBatch, root: Tensor | None, seed: Tensor | None, of_weights: bool, scale: float = 1.0
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Return the gradient of the input (B, T, C), None on the first stage, and those of `parameters`, none unless
        `of_weights`, all multiplied by `scale`. `seed` is the gradient of the output (None: ones). `root` is what `run`
        returned, whose graph is used up; None runs again. Raises StageRefused ("not_finite")."""
        inputs = [*([] if self._is_first else [held.x]), *(self.parameters if of_weights else [])]
        if not inputs:
            return None, ()
        root = self.run(held, True, scale)[1] if root is None else root
        gradients = torch.autograd.grad(root, inputs, _scaled(held.seed(root, seed), scale))
        each = zip(gradients, inputs, strict=True)
        _require_finite([one for one, of in each if self._tells(of, held)], self._ranks)
        return (None, gradients) if self._is_first else (gradients[0], gradients[1:])

    def _tells(self, of: Tensor, held: HeldMicroBatch) -> bool:
        """Whether the gradient of this tensor must be looked at. A value that is not finite spreads backward through
        every norm layer before it, and the few values of these show it; but a single product in fp16 may overflow, and
        beside an adapter the norms are frozen."""
        return of is held.x or of.dim() == 1 or self._tells_all


class CutForwardBackward:
    """The same where each rank has a part of each parameter: its pieces are `flat` (n,). `scratch`, as long, takes the
    gradients of one micro-batch.

    A backward repeats the forward. Between the two the blocks' weights, which a forward has gathered, would stay.
    """

    compiled = False

    def __init__(
        self,
        model: ModelConfig,
        inner: InnerConfig,
        device: Device,
        spec: StageSpec,
        flat: Tensor,
        scratch: Tensor,
        ranks: Ranks,
    ) -> None:
        from peer.parallel.cut_model import CutModel

        self.flat = flat
        self._narrow = narrow_type(device, inner)
        self._model = CutModel(model, ranks, self._narrow, spec.span)
        self._model.bind(flat, scratch)
        self._model.module.decoder.marked = spec.marked
        self._scratch = scratch
        self._views = self._model.pieces.layout.views(scratch)
        self.names = list(self._views)
        self._is_first = spec.is_first
        self._ranks = ranks

    @torch.no_grad()
    def run(self, held: HeldMicroBatch, with_graph: bool, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        """As `ForwardBackward.run`, but without a graph."""
        assert not with_graph
        out, root = self._passed(held, scale)
        self._model.release()
        return out, root

    def gradients(
        self, held: HeldMicroBatch, root: Tensor | None, seed: Tensor | None, of_weights: bool, scale: float = 1.0
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        """As `ForwardBackward.gradients`. Those of the weights lie in `scratch`."""
        if self._is_first and not of_weights:
            return None, ()
        self._scratch.zero_()
        if not self._is_first:
            held.x.requires_grad_()
        root = self._passed(held, scale)[1]
        root.backward(_scaled(held.seed(root, seed), scale))
        of_input, held.x.grad = held.x.grad, None
        telling = [view for view in self._views.values() if view.dim() == 1 or self._narrow == torch.float16]
        _require_finite(telling if of_input is None else [*telling, of_input], self._ranks)
        return of_input, tuple(self._views.values()) if of_weights else ()

    def _passed(self, held: HeldMicroBatch, scale: float) -> tuple[Tensor, Tensor]:
        self._model.module.decoder.loss_weight = scale
        with autocast(self._ranks.device, self._narrow):
            out, root = self._model.module(held.x, held.counted_targets)
            return out, root


def _scaled(seed: Tensor, scale: float) -> Tensor:
    return seed if scale == 1.0 else seed * scale


def _require_finite(telling: list[Tensor], ranks: Ranks) -> None:
    """Raise StageRefused ("not_finite") at all ranks if a value is not finite at one."""
    if not math.isfinite(ranks.sum((float(get_total_norm(telling)),))[0]):
        raise StageRefused("the stage's gradients are not finite: send another gradient", "not_finite")
