"""The inner optimizer of one rank, and its state in the order of the whole model, which another layout can load."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from peer.compute.adamw_8bit import AdamW8bit, CodedMoments
from peer.compute.adamw_fused import FusedAdamW
from peer.compute.build_optimizer import build_inner
from peer.compute.optimizer import InnerOptimizer, InnerSpec
from peer.footprint.optimizer_state import BLOCK, COUNT_BYTES, coded_names
from peer.model.layout import FlatLayout
from peer.parallel.pieces import LocalPieces
from peer.parallel.ranks import Ranks


class RankOptimizer:
    """An `optimizer` of this rank's `weights` (n,), its `pieces` of a vector that is laid out as `whole` says. The
    layout of the ranks has been checked for it."""

    def __init__(self, spec: InnerSpec, whole: FlatLayout, pieces: LocalPieces, ranks: Ranks, weights: Tensor) -> None:
        self._pieces = pieces
        self._ranks, self._whole = ranks, whole
        self.optimizer: InnerOptimizer
        if spec.optimizer == "adamw8bit":
            self.optimizer = AdamW8bit(spec, pieces.layout, weights, coded_names(whole.shapes))
        else:
            build = FusedAdamW if spec.optimizer == "adamw" else build_inner
            self.optimizer = build(spec, pieces.layout, weights)

    def save(self, out: Tensor) -> None:
        """Write what this rank owns of the state to `out`, uint8, as `InnerOptimizer.save` writes the whole."""
        if self._pieces.is_whole:
            if self._ranks.rank == 0:
                self.optimizer.save(out)
            return
        for local, whole in self._views(out, owned=True):
            whole.copy_(local)
        if self._ranks.rank == 0:
            out[-COUNT_BYTES:].view(torch.int64).fill_(self.optimizer.steps)

    def load(self, saved: Tensor) -> None:
        """Restore the state that the ranks of any layout have saved. All zero is the state before the first step."""
        if self._pieces.is_whole:
            self.optimizer.load(saved)
            return
        self.optimizer.steps = int(saved[-COUNT_BYTES:].view(torch.int64))
        if self.optimizer.steps:
            for local, whole in self._views(saved, owned=False):
                local.copy_(whole)

    def _views(self, saved: Tensor, owned: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield what this rank holds, or exports, of the state, and where it lies in `saved`."""
        if isinstance(self.optimizer, AdamW8bit):
            yield from self._coded_views(self.optimizer.moments, saved, owned)
            return
        local = list(self.optimizer.state.view(-1, self._pieces.layout.numel).unbind())
        values = saved[: len(local) * self._pieces.numel * 4].view(torch.float32)
        for mine, whole in zip(local, values.view(len(local), -1).unbind(), strict=True):
            for strip in self._pieces.strips(owned=owned):
                yield strip.of_local(mine), strip.of_flat(whole)

    def _coded_views(self, moments: CodedMoments, saved: Tensor, owned: bool) -> Iterator[tuple[Tensor, Tensor]]:
        coded = coded_names(self._whole.shapes)
        whole = CodedMoments.of(saved, self._whole, coded)
        for name, piece in self._pieces.pieces.items():
            begin, is_coded = self._whole.slots[name].offset, name in coded
            parts = [(moments.floats[name], whole.floats[name], BLOCK if is_coded else 1)]
            if is_coded:
                parts.append((moments.codes[name], whole.codes[name], 1))
            for strip in piece.strips(0, self._pieces.numel, owned):
                for mine, theirs, block in parts:
                    there = strip.of_blocks(begin, piece.at, block)
                    yield from zip(map(there.of_local, mine), map(there.of_flat, theirs), strict=True)
