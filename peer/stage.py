"""One stage of the model: forward and backward of many micro-batches in flight, and steps of its weights.

Shapes: B sequences, T tokens, C hidden_size, P parameters of this stage (the length of its flat vectors).

Gradients are those of the loss in nats summed over the tokens of a micro-batch, so that micro-batches of any size just
add up; the mean over all tokens is taken once, at the end. Every call checks its input first and either does all or
raises StageRefused and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.utils import get_total_norm

from peer.config import InnerConfig, ModelConfig
from peer.device import Device, uses_bf16
from peer.errors import StageRefused
from peer.inner import InnerOptimizer, InnerSpec, build_inner
from peer.inner_fused import FusedAdamW
from peer.layout import FlatLayout
from peer.model import Decoder
from peer.stage_checks import check_gradient, check_input, require_finite
from peer.stage_spec import MicroBatch, Moved, StageSpec, Taken
from peer.stage_store import ActivationStore, GraphSize, Held
from peer.training import learning_rate


class Stage:
    """The blocks `spec.layers` of `model` on `device`, with `local` weights, summed `gradient` (both flat, P fp32) and
    an inner `optimizer`.

    Its weights have an `epoch`, a number the network gives: of target batches in synchronous mode, of outer commits in
    DiLoCo mode (inner steps leave it alone); None until weights are imported. A micro-batch more than `spec.staleness`
    epochs away from it, either way, is refused. One that went forward before the weights last changed, and is not
    too old, has its forward computed anew in the backward: its gradient is that of the weights at that time.

    Not safe for threads. Raises ConfigError for a model that cannot be cut so.
    """

    def __init__(self, model: ModelConfig, inner: InnerConfig, device: Device, spec: StageSpec) -> None:
        spec.check(model)
        self.model, self.inner, self.spec, self.device = model, inner, spec, device
        self.layout = FlatLayout.of(model, spec.layers)
        self.local = torch.zeros(self.layout.numel, device=device.torch)
        self.gradient = torch.zeros_like(self.local)
        build = FusedAdamW if inner.optimizer == "adamw" else build_inner
        self.optimizer: InnerOptimizer = build(InnerSpec.of(inner), self.layout, self.local)
        self.epoch: int | None = None
        self.held = ActivationStore(spec.held_max, spec.held_max_bytes)
        decoder = Decoder(model, self.local, spec.layers)
        views = self.layout.views(self.gradient)
        self._parameters = [parameter for _, parameter in decoder.canonical_parameters()]
        self._gradients = [views[name] for name, _ in decoder.canonical_parameters()]
        self.compiled = inner.compile and device.compile
        self._decoder: Callable[[Tensor], Tensor] = torch.compile(decoder) if self.compiled else decoder
        self._bf16 = uses_bf16(device, inner)
        self._graph_bytes: dict[torch.Size, int] = {}  # by the shape of the input: measured once
        self._seen: dict[
            str, int
        ] = {}  # id -> epoch of micro-batches whose backward is done, while they may come again
        self._counted: dict[str, int] = {}  # id -> epoch of those in `gradient`
        self._tokens = 0  # of these

    def forward(self, micro_batch: MicroBatch, x: Tensor, targets: Tensor | None = None, keep: bool = True) -> Tensor:
        """The hidden state (B, T, C) for the next stage; of the last one each token's loss in nats, (B, T). fp32.

        `x`: token ids (B, T) int64 for the first stage, else the hidden state (B, T, C) fp32; copied. `targets` (B, T)
        int64, the ids that follow, are for the last stage alone. `keep`: hold what the backward needs under the id;
        without it (evaluation) the id means nothing. Raises StageRefused.
        """
        self._check(micro_batch)
        check_input(self.spec, self.model, x, targets)
        if keep and (micro_batch.id in self.held or micro_batch.id in self._seen):
            raise StageRefused(f"micro-batch {micro_batch.id!r} has been here: it counts once a stage", "duplicate")
        x = x.detach().to(self.device.torch, copy=True)
        held = Held(micro_batch, x, None if targets is None else targets.to(self.device.torch, copy=True))
        with_graph = keep and not self.spec.recompute
        if keep:
            graph_bytes = self._graph_bytes.get(x.shape, 0) if with_graph else 0
            self.held.require_room(held.size_bytes + graph_bytes)
        out = self._run(held, with_graph)
        result = out.detach()
        require_finite(result, "the stage's output")
        if keep:
            held.out = out if with_graph else None
            held.graph_bytes = self._graph_bytes.get(x.shape, 0)
            self.held.add(held)
        return result

    def backward(self, micro_batch: MicroBatch, gradient: Tensor | None = None) -> Tensor | None:
        """Count the micro-batch in `gradient` and let go of it; the gradient of its input (B, T, C), None on the first.

        `gradient` (B, T, C) fp32 is that of what `forward` returned, None on the last stage. Raises StageRefused; the
        micro-batch is then still held, for a better gradient.
        """
        self._check(micro_batch)
        held = self.held.find(micro_batch)
        check_gradient(self.spec, self.model, held.shape, gradient)
        if held.out is None:
            out = self._run(held, with_graph=True)
        else:
            out = held.out
            self.held.forget_graph(held)  # it serves once
        inputs = self._parameters if self.spec.is_first else [held.x, *self._parameters]
        seed = torch.ones_like(out) if gradient is None else gradient.to(out.device)
        gradients = torch.autograd.grad(out, inputs, seed)
        if not math.isfinite(float(get_total_norm(gradients))):
            raise StageRefused("the stage's gradients are not finite: send another gradient", "not_finite")
        for total, one in zip(self._gradients, gradients[-len(self._parameters) :], strict=True):
            total.add_(one)
        self.held.remove(micro_batch.id)
        self._seen[micro_batch.id] = micro_batch.epoch
        self._counted[micro_batch.id] = micro_batch.epoch
        self._tokens += held.shape.numel()
        return None if self.spec.is_first else gradients[0]

    def drop(self, id: str) -> bool:
        """Let go of a micro-batch that awaits its backward; whether there was one."""
        return self.held.remove(id)

    @torch.no_grad()
    def take_gradient(self, out: Tensor) -> Taken:
        """Write the mean gradient over the tokens counted since the last taking into `out` (P,), zero if there were
        none, and begin anew."""
        torch.div(self.gradient.to(out.device), max(1, self._tokens), out=out)
        return self._forget_gradient(float(out.norm()))

    @torch.no_grad()
    def step(
        self, step: int, gradient: Tensor | None = None, norm: float | None = None, epoch: int | None = None
    ) -> Moved:
        """One step of the inner optimizer at the learning rate of the run's inner step `step`.

        By `gradient` (P,), a mean that replicas agreed on, or (None) by this stage's own, which is taken. It is clipped
        by `norm`, that of the whole model's gradient, or (None) by its own. `epoch` numbers the weights anew. Replicas
        on unlike machines end with unlike last bits: where they must not, step outside and `import_weights`.
        Raises StageRefused ("no_weights", "empty", "shape", "not_finite").
        """
        if self.epoch is None:
            raise _no_weights()
        own = gradient is None
        if gradient is None:
            if not self._tokens:
                raise StageRefused("no micro-batch was counted since the last step: there is nothing to do", "empty")
            gradient = self.gradient / self._tokens
        elif gradient.shape != self.local.shape:
            raise StageRefused(f"the gradient has shape {tuple(gradient.shape)}, not ({len(self.local)},)", "shape")
        else:
            gradient = gradient.to(self.device.torch, copy=True)
        norm = require_finite(gradient, "the gradient") if norm is None else norm
        if not math.isfinite(norm):
            raise StageRefused("the norm of the gradient is not finite", "not_finite")
        taken = self._forget_gradient(norm).micro_batches if own else ()
        if norm > self.inner.clip_norm:
            gradient.mul_(self.inner.clip_norm / norm)
        self.optimizer.lr = learning_rate(self.inner, step)
        self.optimizer.step(self.local, gradient)
        return self._moved(self.epoch if epoch is None else epoch, taken)

    @torch.no_grad()
    def import_weights(self, weights: Tensor, epoch: int) -> Moved:
        """Take `weights` (P,) over as those of `epoch`; the inner optimizer goes on. Raises StageRefused."""
        if weights.shape != self.local.shape:
            raise StageRefused(f"the weights have shape {tuple(weights.shape)}, not ({len(self.local)},)", "shape")
        require_finite(weights, "the weights")
        self.local.copy_(weights)
        return self._moved(epoch)

    def _moved(self, epoch: int, taken: tuple[str, ...] = ()) -> Moved:
        """The weights are others now: graphs hold for them no more, and what is too far from `epoch` goes."""
        self.epoch = epoch
        near = range(epoch - self.spec.staleness, epoch + self.spec.staleness + 1)
        self.held.forget_graphs()
        expired = self.held.remove_outside(near)
        self._seen = {id: of for id, of in self._seen.items() if of in near}
        uncounted: tuple[str, ...] = ()
        if any(of not in near for of in self._counted.values()):
            uncounted = self._forget_gradient(0.0).micro_batches  # they are one sum: none can be kept
        return Moved(epoch, taken, expired, uncounted)

    def _forget_gradient(self, norm: float) -> Taken:
        taken = Taken(tuple(self._counted), self._tokens, norm)
        self.gradient.zero_()
        self._counted, self._tokens = {}, 0
        return taken

    def _run(self, held: Held, with_graph: bool) -> Tensor:
        """The stage's output for the kept input; the first graph of its shape is measured."""
        size = GraphSize(self.local)
        measured = size.measured() if with_graph and held.x.shape not in self._graph_bytes else nullcontext()
        if with_graph and not self.spec.is_first:
            held.x.requires_grad_()
        bf16 = torch.autocast(self.device.torch.type, dtype=torch.bfloat16, enabled=self._bf16)
        with torch.set_grad_enabled(with_graph), measured, bf16:
            out = self._decoder(held.x)
            if held.targets is not None:
                losses = F.cross_entropy(out.flatten(0, 1).float(), held.targets.flatten(), reduction="none")
                out = losses.view(held.shape)
            out = out.float()
        if with_graph:
            self._graph_bytes.setdefault(held.x.shape, size.size_bytes)
        return out

    def _check(self, micro_batch: MicroBatch) -> None:
        if micro_batch.stage != self.spec.index:
            raise StageRefused(f"this is stage {self.spec.index}, not {micro_batch.stage}: look it up again", "stage")
        if self.epoch is None:
            raise _no_weights()
        if abs(micro_batch.epoch - self.epoch) > self.spec.staleness:
            raise StageRefused(
                f"micro-batch {micro_batch.id!r} is of epoch {micro_batch.epoch}, the stage in {self.epoch} and takes "
                f"{self.spec.staleness} more or less: catch up first",
                "epoch",
            )


def _no_weights() -> StageRefused:
    return StageRefused("the stage has no weights: import them first", "no_weights")
