"""The FLOP/s that this machine keeps up in training, measured on one block of a model."""

from __future__ import annotations

import time
from typing import Final

import msgspec
import torch

from peer.compute.device import narrow_type, resolve_device
from peer.compute.train_loop import InnerTrainer
from peer.config import InnerConfig, ModelConfig
from peer.footprint.work import training_work

_FLOPS_MOST: Final = 2e11  # of one step on a CPU: some seconds
_FLOPS_MOST_GPU: Final = 2e13
_STEPS: Final = 3


def measured_flops(model: ModelConfig, inner: InnerConfig, seq_len: int, device: str) -> float:
    """Return the FLOP/s of the fastest of some steps of one group of blocks, of the model's width, on `device`."""
    found = resolve_device(device)
    layers = model.shared_blocks
    small = msgspec.structs.replace(model, layers=layers, vocab_size=256, tie_embeddings=True)
    most = _FLOPS_MOST if found.torch.type == "cpu" else _FLOPS_MOST_GPU
    length = seq_len
    while length > 16 and length * training_work(small, range(layers), length) > most:
        length //= 2
    sequences = max(1, int(most // (length * training_work(small, range(layers), length))))
    sequences = min(sequences, inner.batch_size)
    quick = msgspec.structs.replace(inner, optimizer="adamw")
    trainer = InnerTrainer(small, quick, found)
    tokens = torch.zeros(sequences, length + 1, dtype=torch.int64)
    best = 0.0
    for step in range(_STEPS):
        begin = time.perf_counter()
        trainer.step(tokens, step)
        if found.torch.type == "cuda":
            torch.cuda.synchronize(found.torch)
        seconds = time.perf_counter() - begin
        best = max(best, sequences * length * training_work(small, range(layers), length) / seconds)
    return best


def device_facts(device: str, inner: InnerConfig) -> tuple[str, bool, float]:
    """Return the kind of this machine's `device`, whether a run computes in 16 bits there, and its memory in bytes (0
    of a CPU). Raises ConfigError."""
    found = resolve_device(device)
    memory = float(torch.cuda.get_device_properties(found.torch).total_memory) if found.torch.type == "cuda" else 0.0
    return found.torch.type, narrow_type(found, inner) is not None, memory
