"""What one stage computes, by one device or by ranks that share it: the same calls at all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import torch
from msgspec.structs import replace
from torch import Tensor

from peer.compute.device import resolve_device
from peer.compute.stage import Stage
from peer.config import ComputeType, InnerConfig, ModelConfig
from peer.errors import StageRefused
from peer.ipc.span import spans_of
from peer.ipc.stage_spec import MicroBatch, StageSpec
from peer.model.layout import init_flat, split_flat
from peer.parallel.ranks import Ranks

MODEL: Final = ModelConfig(  # with 5, 17 and 13 rows to cut in two
    vocab_size=34,
    hidden_size=5,
    head_dim=4,
    layers=4,
    heads=4,
    kv_heads=2,
    intermediate_size=26,
    max_seq_len=16,
    tie_embeddings=False,
)
STAGES: Final = spans_of([(0, 1), (1, 3), (3, 4)])
LAYOUTS: Final = ("ddp", "fsdp", "ddp-fsdp")
_INNER: Final = InnerConfig(lr=1e-2, batch_size=4, total_steps=100, dtype="fp32", clip_norm=1e9)
_ROWS: Final = {"a": 5, "b": 1, "c": 4, "d": 3}
_LENGTH: Final = 7
_BAD_TOKEN: Final = 33

Place = Callable[[str, tuple[int, ...]], Tensor]
"""Gives the one tensor of that name and shape that all ranks write."""


class StageScene:
    """Stage `index`; `found` are its outputs, gradients and weights by name."""

    def __init__(self, index: int, ranks: Ranks, place: Place, dtype: ComputeType = "fp32") -> None:
        spec = StageSpec(span=STAGES[index], index=index, max_tokens=64, previous=True, staleness=1)
        self._stage = Stage(MODEL, replace(_INNER, dtype=dtype), resolve_device("cpu"), spec, ranks)
        self._ranks, self._place = ranks, place
        self._start = split_flat(MODEL, init_flat(MODEL, seed=1), STAGES)[index]
        self.found: dict[str, Tensor] = {}

    def play(self) -> None:
        """Go forward with several micro-batches before the backwards, one with fewer rows than there are ranks."""
        stage = self._stage
        stage.import_weights(self._start, epoch=0)
        stage.export(self._keep("imported"))
        for name in "ab":
            self._forward(name, 0)
        self._forward("d", 0, count=False)
        self._backward("a", 0)
        self._forward("c", 0)
        (held,) = self._ranks.sum((stage.held.size_bytes,))
        assert held == stage.held.size_bytes * self._ranks.layout.size
        stage.read_gradient(self._keep("so far"))
        self._backward("c", 0)
        moved = stage.step(0, epoch=1)
        assert moved.micro_batches == ("a", "c")
        self._backward("d", 0, count=False)  # with the weights before the step
        self._backward("b", 0)  # with those after it
        taken = stage.take_gradient(self._keep("taken"))
        assert taken.micro_batches == ("b",) and taken.tokens == _LENGTH
        self.found["norm"] = torch.tensor(taken.norm)
        stage.export(self._keep("stepped"), self._start, capture=True)
        self._forward("a", 1, attempt=1, keep=False)  # no backward follows it
        stage.import_weights(self._start, epoch=2, rebase=True)
        self._forward("c", 2, attempt=1, keep=False)
        stage.export(self._keep("rebased"))
        if stage.spec.is_first:
            self._refuse()

    def overflow(self) -> dict[str, Tensor]:
        """Begin with a scale of the loss at which fp16 overflows in the stage ("a"), or with the gradient that comes to
        it already ("b", of fewer tokens). Return the gradients, and the repetitions as each rank has counted them."""
        stage = self._stage
        assert stage.scaler is not None
        stage.scaler.scale = 2.0**19
        stage.import_weights(self._start, epoch=0)
        for name in "ab":
            self._forward(name, 0)
        for name in "ab":
            self._backward(name, 0)
        assert stage.take_gradient(self._keep("taken")).micro_batches == ("a", "b")
        overflows = float(stage.overflows)
        assert stage.scaler.scale < 2.0**19
        self.found["overflows"] = torch.tensor([overflows, *self._ranks.sum((overflows,))])
        return self.found

    def _refuse(self) -> None:
        """Hold a row of which the output is not finite. All ranks refuse it, those without the row as well."""
        weights = self._start.clone()
        self._stage.layout.views(weights)["model.embed_tokens.weight"][_BAD_TOKEN] = (
            5e18  # whose norm is finite, and that of a row of it not
        )
        self._stage.import_weights(weights, epoch=3)
        tokens = torch.zeros(2, _LENGTH, dtype=torch.int64)
        tokens[0] = _BAD_TOKEN
        for counted in (True, False):
            try:
                self._stage.forward(MicroBatch("bad", 0, 3, count=counted), tokens)
            except StageRefused as refused:
                assert refused.reason == "not_finite"
            else:
                raise AssertionError("a rank takes what is not finite")

    def _forward(self, name: str, epoch: int, *, attempt: int = 0, count: bool = True, keep: bool = True) -> None:
        stage, rows = self._stage, _ROWS[name]
        random = torch.Generator().manual_seed(rows)
        tokens = torch.randint(0, _BAD_TOKEN, (rows, _LENGTH + 1), generator=random)
        hidden = torch.randn(rows, _LENGTH, MODEL.hidden_size, generator=random)
        micro_batch = MicroBatch(name, stage.spec.index, epoch, count, attempt)
        x, targets = tokens[:, :-1] if stage.spec.is_first else hidden, tokens[:, 1:] if stage.spec.is_last else None
        out = stage.forward(micro_batch, x, targets, keep)
        whole = self._place(f"{name}{epoch} forward", (rows, *out.shape[1:]))
        stage.share.rows(whole).copy_(out)
        self.found[f"{name}{epoch} forward"] = whole

    def _backward(self, name: str, epoch: int, *, count: bool = True) -> None:
        stage, shape = self._stage, (_ROWS[name], _LENGTH, MODEL.hidden_size)
        seed = torch.randn(shape, generator=torch.Generator().manual_seed(9))
        micro_batch = MicroBatch(name, stage.spec.index, epoch, count)
        gradient = stage.backward(micro_batch, None if stage.spec.is_last else seed)
        if gradient is not None:
            whole = self._place(f"{name} backward", shape)
            stage.share.rows(whole).copy_(gradient)
            self.found[f"{name} backward"] = whole

    def _keep(self, what: str) -> Tensor:
        self.found[what] = self._place(what, (self._stage.layout.numel,))
        return self.found[what]
