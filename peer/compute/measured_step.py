"""The largest step that fits on a GPU, found by trying."""

from __future__ import annotations

import gc

import torch

from peer.compute.out_of_memory import free_cached, is_out_of_memory
from peer.compute.train_loop import InnerTrainer
from peer.errors import ConfigError
from peer.footprint.step_size import RECOMPUTE, USED, StepSize, doubled, is_enough


def measured_step(trainer: InnerTrainer, seq_len: int, limit_bytes: float) -> StepSize:
    """Return the fastest step that takes at most `USED` of the memory that is free, of `limit_bytes` at most: each
    micro-batch twice the one before, with more recomputation where few sequences fit. Weights and optimizer stay as
    they are. The process is held to `limit_bytes` from now on. Raises ConfigError if nothing fits.
    """
    device = trainer.device.torch
    room = USED * _free_bytes(device, limit_bytes)
    batch, best = trainer.config.batch_size, None
    for recompute in RECOMPUTE:
        taken = 0
        for sequences in doubled(batch):
            size = StepSize(sequences, recompute)
            if 2 * taken > room or (taken := _peak_bytes(trainer, size, seq_len)) > room:
                break
            if best is None or size.sequences > best.sequences:
                best = size
        if best is not None and is_enough(best, batch, seq_len, "cuda"):
            break
    if best is None:
        raise ConfigError(
            f"not even one sequence fits into the {room / 1e9:.3g} GB of the device that a step may use: free"
            " some, raise --memory-limit, or join a run of a smaller model"
        )
    return best


def _free_bytes(device: torch.device, limit_bytes: float) -> float:
    """Hold this process to the limit; return what it may still take."""
    free_cached(device)
    free = hold_to(device, limit_bytes)
    return min(float(free), limit_bytes - torch.cuda.memory_reserved(device))


def hold_to(device: torch.device, limit_bytes: float) -> int:
    """Let this process take no more of a GPU than that; return what is free there."""
    free, whole = torch.cuda.mem_get_info(device)
    torch.cuda.set_per_process_memory_fraction(min(1.0, limit_bytes / whole), device)
    return free


def _peak_bytes(trainer: InnerTrainer, size: StepSize, seq_len: int) -> int:
    """Return the further memory that a step of that size takes; if it fails, more than any device has."""
    device = trainer.device.torch
    trainer.resize(size)
    free_cached(device)
    before = torch.cuda.memory_reserved(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        trainer.try_step(size.sequences, seq_len)
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        peak = 1 << 60
    else:
        peak = torch.cuda.max_memory_reserved(device) - before
    gc.collect()  # a graph that broke off may hold on to its tensors
    free_cached(device)
    return peak
