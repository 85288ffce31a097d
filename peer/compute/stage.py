"""One stage of the model: forward and backward of many micro-batches in flight, and changes of its weights.

Shapes: B sequences, T tokens, C hidden_size, P parameters of this stage (the length of its flat vectors), b sequences
and n parameters of this rank.

Every call checks its input first. It either does its work or raises StageRefused and changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peer.compute.activation_store import ActivationStore, HeldMicroBatch
from peer.compute.device import Device, narrow_type
from peer.compute.gradient_accumulator import GradientSum
from peer.compute.optimizer import InnerSpec
from peer.compute.rank_optimizer import RankOptimizer
from peer.compute.stage_checks import check_gradient, check_input, pass_scale, require_finite, require_finite_norm
from peer.compute.stage_forward_backward import CutForwardBackward, ForwardBackward
from peer.compute.train_loop import learning_rate
from peer.config import InnerConfig, ModelConfig
from peer.errors import StageRefused
from peer.footprint.layout import ONE_DEVICE
from peer.ipc.stage_spec import TAKEN_NORM_MAX, MicroBatch, Moved, PassKey, StageSpec, Taken
from peer.model.decoder import Decoder
from peer.model.frozen_weights import FrozenWeights
from peer.model.layout import FlatLayout
from peer.model.mixed_precision import PassScale, scaler_for
from peer.parallel.ranks import Ranks
from peer.parallel.stage_share import StageShare


@dataclass(frozen=True)
class _Captured:
    """The local weights at an export, and the ids whose gradients they contain."""

    local: Tensor
    learned: frozenset[str]


class Stage:
    """The blocks `spec.span` of `model` on `device`, with `local` weights (flat, n fp32), the `gradient` for their next
    step, and an inner `optimizer`.

    Of several `ranks` each has its `share` of the weights and of every micro-batch's rows. All of them must get the
    same calls in the same order: they refuse the same ones. On one device n = P.

    The weights have an `epoch`, a number that the network gives: of target batches in synchronous mode, of outer
    commits in DiLoCo mode, where inner steps leave it alone. It is None until weights are imported. A micro-batch more
    than `spec.staleness` epochs away is refused. If the weights changed after a micro-batch went forward, its backward
    repeats the forward: the gradient is that of the present weights.

    Of a model with an adapter the weights are the adapter's, and `base` is frozen beside them.

    With `spec.previous` the weights of the epoch before are kept. A micro-batch of that epoch that does not count is
    computed with them, also if its backward comes in the present epoch.

    In fp16 a stage has a `scaler` of its own: what comes from other stages and goes to them has no scale. A backward
    that overflows is repeated at a smaller scale, at most `REPEATS_MAX` times; `overflows` counts how often.

    Not thread-safe. Raises ConfigError for a model that cannot be split like this.
    """

    def __init__(
        self,
        model: ModelConfig,
        inner: InnerConfig,
        device: Device,
        spec: StageSpec,
        ranks: Ranks | None = None,
        base: FrozenWeights | None = None,
    ) -> None:
        spec.check(model)
        ranks = Ranks(ONE_DEVICE, 0, device.torch) if ranks is None else ranks
        self._is_cut = ranks.layout.parts > 1
        self._drops = model.adapter is not None and model.adapter.dropout > 0
        self.model, self.inner, self.spec, self.device = model, inner, spec, device
        self.layout = FlatLayout.of(model, spec.span)
        self.share = StageShare(self.layout, ranks)
        self.local = torch.zeros(self.share.pieces.layout.numel, device=device.torch)
        self.optimizer_state = RankOptimizer(InnerSpec.of(inner), self.layout, self.share.pieces, ranks, self.local)
        self.optimizer = self.optimizer_state.optimizer
        self.epoch: int | None = None
        self.held = ActivationStore(spec.held_max, spec.held_max_bytes)
        self.scaler = scaler_for(narrow_type(device, inner))
        self.overflows = 0
        self._graph_bytes: dict[torch.Size, int] = {}  # by the shape of the input: measured once
        scratch = torch.zeros_like(self.local) if self._is_cut else None

        def over(flat: Tensor) -> ForwardBackward | CutForwardBackward:
            if scratch is None:
                decoder = Decoder(model, flat, spec.span, base)
                decoder.marked = spec.marked
                return ForwardBackward(decoder, inner, device, self._graph_bytes, ranks)
            return CutForwardBackward(model, inner, device, spec, flat, scratch, ranks)

        self._present = over(self.local)
        self._previous = over(torch.zeros_like(self.local)) if spec.previous else None
        self._previous_epoch: int | None = None
        self.gradient = GradientSum(self.share.pieces.layout, self._present.names, self.local)
        self.compiled = self._present.compiled
        self._captured: _Captured | None = None
        self._seen: dict[str, int] = {}  # id -> epoch of the micro-batches counted since the weights were imported

    def forward(self, micro_batch: MicroBatch, x: Tensor, targets: Tensor | None = None, keep: bool = True) -> Tensor:
        """Return the hidden state (b, T, C) for the next stage, or the last stage's loss of each token in nats, (b, T),
        of this rank's rows. fp32.

        `x` holds token ids (B, T) int64 for the first stage, else the hidden state (B, T, C) fp32; it is copied.
        `targets` (B, T) int64, the ids that follow, are for the last stage only. `keep` holds what the backward needs
        under the key of the micro-batch; without it (evaluation) the key has no meaning. Raises StageRefused.
        """
        epoch = self._check(micro_batch)
        check_input(self.spec, self.model, x, targets)
        if keep:
            self._check_new(micro_batch)
        held = HeldMicroBatch(
            micro_batch,
            epoch,
            x=self.share.dealt(x.detach(), x[:1]),
            targets=None if targets is None else self.share.dealt(targets, targets[:1]),
            own=len(self.share.rows(x)),
            batch=len(x),
            samples=self.share.samples(micro_batch.sample, len(x)) if keep and self._drops else None,
        )
        x = held.x
        with_graph = keep and not self.recompute and (micro_batch.count or not self.spec.is_first)
        with_graph = with_graph and self._may_keep_graph(held)
        if keep:
            graph_bytes = self._graph_bytes.get(x.shape, 0) if with_graph else 0
            self.held.require_room(held.size_bytes + graph_bytes)
        out, root = self._compute(held, micro_batch.count).run(held, with_graph, self._scale(held))
        result = out.detach()[: held.own]
        require_finite_norm(self.share.ranks.sum((float(result.norm()),))[0], "the stage's output")
        if keep:
            held.root = root if with_graph and self._may_keep_graph(held) else None  # its size is known now
            held.graph_bytes = self._graph_bytes.get(x.shape, 0)
            self.held.add(held)
        return result

    def backward(self, micro_batch: MicroBatch, gradient: Tensor | None = None) -> Tensor | None:
        """Return the gradient of the input of this rank's rows (b, T, C), None on the first stage. Drop the
        micro-batch, and add the gradients of its weights to the sum if it counts.

        `gradient` (B, T, C) fp32 is that of the output of `forward`, None on the last stage. A micro-batch whose
        forward counted may end without counting, but not the reverse. Raises StageRefused; the micro-batch is then
        still held, for another gradient.
        """
        self._check(micro_batch)
        held = self.held.find(micro_batch)
        check_gradient(self.spec, self.model, held.shape, gradient)
        tried = pass_scale(self.scaler, gradient, held.shape.numel())
        if gradient is not None:
            gradient = self.share.dealt(gradient, torch.zeros_like(gradient[:1]))
        root = held.root
        self.held.forget_graph(held)  # a graph serves once
        of_input, of_weights, scale = self._gradients(held, root, gradient, micro_batch.count, tried)
        self.held.remove(micro_batch.key)
        if micro_batch.count:
            targets = held.shape.numel() if micro_batch.targets is None else micro_batch.targets
            self.gradient.add(micro_batch, targets, of_weights, scale)
            self._seen[micro_batch.id] = micro_batch.epoch
        if of_input is None:
            return None
        return of_input[: held.own] if scale == 1.0 else of_input[: held.own] / scale

    def drop(self, key: PassKey) -> bool:
        """Drop a micro-batch that awaits its backward; returns whether it was held."""
        return self.held.remove(key)

    @torch.no_grad()
    def read_gradient(self, out: Tensor) -> Taken:
        """Write the mean gradient over the tokens counted since it was last taken to `out` (P,), zero if there were
        none. More may be added. Raises StageRefused ("no_weights", "not_finite")."""
        self._require_weights()
        norm = require_finite_norm(self._write_mean(out), "the gradient")
        if norm > TAKEN_NORM_MAX:
            raise StageRefused(f"the gradient has a norm of {norm:.1e}, above {TAKEN_NORM_MAX:.0e}", "not_finite")
        return self.gradient.taken(norm)

    @torch.no_grad()
    def take_gradient(self, out: Tensor) -> Taken:
        """As `read_gradient`, and clear the sum. A gradient that is not finite is taken, too, with the norm
        `TAKEN_NORM_MAX`: this is how it is got rid of."""
        self._require_weights()
        norm = self._write_mean(out)
        return self.gradient.forget(norm if norm <= TAKEN_NORM_MAX else TAKEN_NORM_MAX)

    @torch.no_grad()
    def step(
        self, step: int, gradient: Tensor | None = None, norm: float | None = None, epoch: int | None = None
    ) -> Moved:
        """Make a step of the inner optimizer at the learning rate of the run's inner step `step`.

        The step uses `gradient` (P,), or (None) this stage's own, which is taken. It is clipped by `norm`, that of the
        whole model's gradient, or (None) by its own. `epoch` is the new epoch of the weights. The last bits differ
        between machines; where they must not, step outside and use `import_weights`. Raises StageRefused ("no_weights",
        "empty", "shape", "not_finite").
        """
        present = self._require_weights()
        own = gradient is None
        if gradient is None:
            if not self.gradient.counted:
                raise StageRefused("no micro-batch was counted since the last step: send micro-batches first", "empty")
            gradient = self._mean()
        elif gradient.shape != (self.layout.numel,):
            raise StageRefused(f"the gradient has shape {tuple(gradient.shape)}, not ({self.layout.numel},)", "shape")
        else:
            given, gradient = gradient, torch.zeros_like(self.local)
            self.share.pieces.read(given, gradient)
        norm = require_finite_norm(self.share.norm(gradient), "the gradient") if norm is None else norm
        if not math.isfinite(norm):
            raise StageRefused("the norm of the gradient is not finite", "not_finite")
        learns = not own or self.gradient.tokens > 0
        taken = self.gradient.forget().micro_batches if own else ()
        if norm > self.inner.clip_norm:
            gradient.mul_(self.inner.clip_norm / norm)
        epoch = present if epoch is None else epoch
        self._keep_previous(epoch)
        if learns:  # else none of its tokens counts in the loss
            self.optimizer.lr = learning_rate(self.inner, step)
            self.optimizer.step(self.local, gradient)
        return self._moved(epoch, taken)

    @torch.no_grad()
    def export(self, out: Tensor, outer: Tensor | None = None, capture: bool = False) -> None:
        """Write `outer` - local, or (None) the local weights, to `out`, all (P,) on the CPU. `capture` remembers the
        local weights for an import that rebases. Raises StageRefused ("no_weights")."""
        self._require_weights()
        if outer is None:
            self.share.pieces.write(self.local, out)
        else:
            self.share.write_difference(outer, self.local, out)
        if capture:
            self._captured = _Captured(self.local.clone(), self._learned)

    @torch.no_grad()
    def import_weights(self, weights: Tensor, epoch: int, rebase: bool = False) -> Moved:
        """Replace the local weights by `weights` (P,), those of `epoch`. The inner optimizer keeps its state. Raises
        StageRefused.

        `rebase` adds what was learned since the last capture, weights + (local - captured), and keeps the gradient sum.
        The capture is used up; without one `rebase` has no effect. An id whose gradient is in replaced weights, or in
        the capture, may count again: this stage does not know whether it was merged.
        """
        if weights.shape != (self.layout.numel,):
            raise StageRefused(f"the weights have shape {tuple(weights.shape)}, not ({self.layout.numel},)", "shape")
        require_finite(weights, "the weights")
        self._keep_previous(epoch)
        captured, self._captured = self._captured if rebase else None, None
        if captured is None:
            self.share.pieces.read(weights, self.local)
            learned = self._learned
        else:
            self.local.sub_(captured.local)
            self.share.add(weights, self.local)
            learned = captured.learned
        self._seen = {id: of for id, of in self._seen.items() if id not in learned}
        return self._moved(epoch, gradient_stays=captured is not None)

    def _gradients(
        self, held: HeldMicroBatch, root: Tensor | None, seed: Tensor | None, of_weights: bool, tried: PassScale | None
    ) -> tuple[Tensor | None, Sequence[Tensor], float]:
        """Return the gradients of the input and of the weights, and the scale that they are multiplied by. Repeat what
        overflows in fp16 at a smaller one: a micro-batch must not be missing in one stage alone. Raises StageRefused
        ("not_finite") where no scale helps."""
        compute = self._compute(held, of_weights)
        while True:
            scale = 1.0 if tried is None else tried.scale / held.shape.numel()
            try:
                found = compute.gradients(held, root, seed, of_weights, scale)
            except StageRefused:
                if tried is None or not tried.shrink():
                    raise
                root = None  # its graph is used up
                self.overflows += 1
            else:
                if tried is not None:
                    tried.keep()
                return *found, scale

    def _scale(self, held: HeldMicroBatch) -> float:
        """Return the factor of the gradients in a backward pass. The scaler's is that of the mean loss; the loss here
        is the sum over the tokens."""
        return 1.0 if self.scaler is None else self.scaler.scale / held.shape.numel()

    def _mean(self) -> Tensor:
        """Return this rank's pieces of the mean gradient."""
        mean = self.gradient.mean()
        self.share.ranks.sum_over_replicas(mean)
        return mean

    def _write_mean(self, out: Tensor) -> float:
        """Write what this rank owns of the mean gradient to `out` (P,); return the norm of the whole."""
        if self.share.ranks.layout.size == 1:
            return float(self.gradient.mean(out).norm())  # a device has no room for another vector
        mean = self._mean()
        self.share.pieces.write(mean, out)
        return self.share.norm(mean)

    def _keep_previous(self, epoch: int) -> None:
        """Keep the weights if `epoch` is about to begin."""
        if self._previous is not None and self.epoch is not None and epoch > self.epoch:
            self._previous.flat.copy_(self.local)
            self._previous_epoch = self.epoch

    def _moved(self, epoch: int, taken: tuple[str, ...] = (), gradient_stays: bool = False) -> Moved:
        """Note changed weights: drop all graphs, and what is too far from `epoch`."""
        self.epoch = epoch
        self.held.forget_graphs()
        near = self._near
        expired = self.held.remove_outside({*near, self._before})
        uncounted: tuple[str, ...] = ()
        if not gradient_stays and any(of not in near for of in self.gradient.counted.values()):
            uncounted = self.gradient.forget().micro_batches  # one sum: no part of it can be kept
        counted = self.gradient.counted
        self._seen = {id: of for id, of in self._seen.items() if of in near or id in counted}
        return Moved(epoch, taken, expired, uncounted)

    @property
    def recompute(self) -> bool:
        """Whether a backward repeats its forward."""
        return self.spec.recompute or self._is_cut

    @property
    def _learned(self) -> frozenset[str]:
        """The ids whose gradients are in the local weights."""
        return frozenset(self._seen.keys() - self.gradient.counted.keys())

    @property
    def _near(self) -> range:
        """The epochs whose micro-batches may count."""
        epoch = self._require_weights()
        return range(epoch - self.spec.staleness, epoch + self.spec.staleness + 1)

    @property
    def _before(self) -> int | None:
        """The epoch before the stage's own, if its weights are kept."""
        is_before = self._previous_epoch is not None and self._previous_epoch + 1 == self.epoch
        return self._previous_epoch if is_before else None

    def _may_keep_graph(self, held: HeldMicroBatch) -> bool:
        """Whether the graph of `held` would fit into an empty store; if not, it never fits."""
        return held.size_bytes + self._graph_bytes.get(held.x.shape, 0) <= self.spec.held_max_bytes

    def _compute(self, held: HeldMicroBatch, count: bool) -> ForwardBackward | CutForwardBackward:
        """Choose the weights: the previous ones for a micro-batch of their epoch that does not count."""
        if self._previous is not None and not count and held.weights_epoch == self._before:
            return self._previous
        return self._present

    def _check(self, micro_batch: MicroBatch) -> int:
        """Return the epoch of the weights for the forward. Raises StageRefused."""
        if micro_batch.stage != self.spec.index:
            raise StageRefused(f"this is stage {self.spec.index}, not {micro_batch.stage}: look it up again", "stage")
        epoch = self._require_weights()
        if not micro_batch.count and micro_batch.epoch == self._before:
            return micro_batch.epoch
        if micro_batch.epoch not in self._near:
            raise StageRefused(
                f"micro-batch {micro_batch.id!r} is of epoch {micro_batch.epoch}, the stage is in epoch {epoch} and "
                f"takes {self.spec.staleness} more or less: catch up first",
                "epoch",
            )
        return epoch

    def _check_new(self, micro_batch: MicroBatch) -> None:
        """Refuse a micro-batch that is held or was counted. Raises StageRefused ("duplicate")."""
        id = micro_batch.id
        if micro_batch.count and (id in self._seen or self.held.is_to_count(id)):
            raise StageRefused(f"micro-batch {id!r} was held or counted before: it counts once a stage", "duplicate")
        if micro_batch.key in self.held:
            raise StageRefused(
                f"attempt {micro_batch.attempt} of micro-batch {id!r} awaits its backward: choose another attempt",
                "duplicate",
            )

    def _require_weights(self) -> int:
        """Return the epoch of the weights. Raises StageRefused ("no_weights")."""
        if self.epoch is None:
            raise StageRefused("the stage has no weights: import them first", "no_weights")
        return self.epoch
