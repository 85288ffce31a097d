"""The task of the benchmarks of convergence: a byte model of 117 thousand parameters on the standard library's text."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import save_file

from peer.compute.build_optimizer import build_inner
from peer.compute.optimizer import InnerSpec
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.data.text_corpus import load_corpus
from peer.data.tokenizer import ByteTokenizer
from peer.model.decoder import Decoder
from peer.model.layout import FlatLayout, init_flat

WORKERS, BATCH, SEQ, WARM_STEPS, RAMP_STEPS, STEPS = 8, 8, 32, 480, 50, 480
HELD_OUT: Final = (128, 8)  # windows a batch, batches
MODEL: Final = ModelConfig(hidden_size=64, layers=2, heads=2, kv_heads=2, intermediate_size=176, max_seq_len=SEQ)
INNER: Final[dict[str, Any]] = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.1}


class Task:
    """The model, its data, and a worker's gradient."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.layout = FlatLayout.of(MODEL)
        self.corpus = load_corpus(DataConfig(seq_len=SEQ, max_bytes=24 << 20), ByteTokenizer())
        self.flat = init_flat(MODEL, seed)
        self.gradients = torch.zeros_like(self.flat)
        self.model = Decoder(MODEL, self.flat)
        self.model.bind_gradients(self.gradients)

    def gradient(self, weights: torch.Tensor, number: int, clip_norm: float = 1.0) -> torch.Tensor:
        """Return the gradient (P,) of the `number`-th batch, its norm clipped (infinite: not clipped)."""
        self.flat.copy_(weights)
        self.gradients.zero_()
        tokens = self.corpus.batch(list(range(number * BATCH, (number + 1) * BATCH)), self.seed)
        self._loss(tokens).backward()
        return self.gradients * min(1.0, clip_norm / float(self.gradients.norm()))

    def loss(self, weights: torch.Tensor) -> float:
        """Return the loss in nats a byte on text that is not trained on."""
        self.flat.copy_(weights)
        with torch.no_grad():
            losses = [float(self._loss(batch)) for batch in self.corpus.held_out_batches(*HELD_OUT)]
        return sum(losses) / len(losses)

    def losses(self, weights: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token (B, T) of tokens (B, T+1) in nats."""
        self.flat.copy_(weights)
        with torch.no_grad():
            _, losses = self.model.losses(self.model.hidden(tokens[:, :-1]), tokens[:, 1:])
        return losses.view(len(tokens), -1)

    def _loss(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens (B, T+1) in nats a token."""
        total, losses = self.model.losses(self.model.hidden(tokens[:, :-1]), tokens[:, 1:])
        return total / losses.numel()


def warm_up(seed: int, folder: Path) -> float:
    """Train one worker alone, with a warm-up; save its weights; return its loss."""
    torch.set_num_threads(1)
    task = Task(seed)
    theta = task.flat.clone()
    adamw = build_inner(InnerSpec.of(inner_config({})), task.layout, theta)
    for step in range(WARM_STEPS):
        adamw.lr = INNER["lr"] * min(1.0, (step + 1) / RAMP_STEPS)
        adamw.step(theta, task.gradient(theta, 10**6 + step))  # samples that no worker reaches
    save_file({"theta": theta}, folder / f"warm-{seed}.safetensors")
    return task.loss(theta)


def inner_config(changes: dict[str, Any]) -> InnerConfig:
    """Return the inner section of a run of `STEPS` steps: `INNER` with `changes`, at a constant rate unless they name
    another schedule."""
    settings = {"schedule": "constant", "total_steps": STEPS, "batch_size": BATCH, "dtype": "fp32"}
    return InnerConfig(**{**settings, **INNER, **changes})
