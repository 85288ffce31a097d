"""The arithmetic of a stage under one set of weights: hidden states forward, gradients backward.

Shapes: B sequences, T tokens, C hidden_size, P parameters of the stage.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.utils import get_total_norm

from peer.compute.activation_store import GraphSize, HeldMicroBatch
from peer.compute.device import Device, uses_bf16
from peer.config import InnerConfig, ModelConfig
from peer.errors import StageRefused
from peer.ipc.stage_spec import StageSpec
from peer.model.decoder import Decoder


class ForwardBackward:
    """The blocks `spec.span` of `model` with the weights `flat` (P fp32, on the device). The caller may change the
    weights while no graph over them is held.

    `graph_bytes` maps the shape of an input to the memory that its graph keeps, measured once.
    """

    def __init__(
        self,
        model: ModelConfig,
        inner: InnerConfig,
        device: Device,
        spec: StageSpec,
        flat: Tensor,
        graph_bytes: dict[torch.Size, int],
    ) -> None:
        decoder = Decoder(model, flat, spec.span)
        self.flat = flat
        self.parameters = [parameter for _, parameter in decoder.canonical_parameters()]
        self.names = [name for name, _ in decoder.canonical_parameters()]
        self.compiled = device.compile
        self._decoder = decoder
        self._hidden: Callable[[Tensor], Tensor] = torch.compile(decoder.hidden) if self.compiled else decoder.hidden
        self._bf16 = uses_bf16(device, inner)
        self._device = device
        self._is_first = spec.is_first
        self._graph_bytes = graph_bytes

    def run(self, held: HeldMicroBatch, with_graph: bool) -> tuple[Tensor, Tensor]:
        """Return the stage's output for the held input, and what its backward pass begins with: both the hidden state
        (B, T, C), of the last stage the losses (B, T) and their sum."""
        size = GraphSize(self.flat)
        measured = size.measured() if with_graph and held.x.shape not in self._graph_bytes else nullcontext()
        if with_graph and not self._is_first:
            held.x.requires_grad_()
        bf16 = torch.autocast(self._device.torch.type, dtype=torch.bfloat16, enabled=self._bf16)
        with torch.set_grad_enabled(with_graph), measured, bf16:
            hidden = self._hidden(held.x)
            if held.targets is None:
                out = root = hidden.float()
            else:
                root, out = self._decoder.losses(hidden, held.targets)
        if with_graph:
            self._graph_bytes.setdefault(held.x.shape, size.size_bytes)
        return out, root

    def gradients(
        self, held: HeldMicroBatch, root: Tensor | None, seed: Tensor | None, of_weights: bool
    ) -> tuple[Tensor | None, Sequence[Tensor]]:
        """Return the gradient of the input (B, T, C), None on the first stage, and those of `parameters`, none unless
        `of_weights`. `seed` is the gradient of the output (None: ones). `root` is what `run` returned, whose graph is
        used up; None runs again. Raises StageRefused ("not_finite")."""
        inputs = [*([] if self._is_first else [held.x]), *(self.parameters if of_weights else [])]
        if not inputs:
            return None, ()
        root = self.run(held, with_graph=True)[1] if root is None else root
        gradients = torch.autograd.grad(root, inputs, torch.ones_like(root) if seed is None else seed.to(root.device))
        # A value that is not finite spreads backward through every norm layer before it: their few values tell.
        telling = [one for one, of in zip(gradients, inputs, strict=True) if of is held.x or of.dim() == 1]
        if not math.isfinite(float(get_total_norm(telling))):
            raise StageRefused("the stage's gradients are not finite: send another gradient", "not_finite")
        return (None, gradients) if self._is_first else (gradients[0], gradients[1:])
