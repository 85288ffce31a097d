"""The engine of one process beside `transformers`, in turn: slices of a few steps each, so that both see the same
machine. Times are of the processor, with one thread."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks.serving.served_model import GREEDY, write_model
from peer.inference.blocks import SpanBlocks
from peer.inference.engine import Engine
from peer.ipc.span import Span
from peer.model.hub_config import read_served_config

SHAPES: Final = {"10M": [(b, c) for c in (128, 1024) for b in (1, 4, 16)], "100M": [(1, 128), (4, 128)]}
"""Batches and contexts."""
AIMS: Final = {("10M", 1, 128): 1.5, ("10M", 4, 128): 1.2}
_PREFILL: Final = 512
_SLICES: Final = 15
_STEPS: Final = 6
_SWEEP_FLOATS: Final = 32 << 20


def prompt_of(number: int, length: int) -> list[int]:
    return [(31 * number + 7 * place) % 8192 for place in range(length)]


def _engine(reference: Any, folder: Path) -> Engine:
    config, window = read_served_config((folder / "config.json").read_bytes())
    weights, span = reference.state_dict(), Span.whole(config.layers)
    return Engine(SpanBlocks(config, span, weights.__getitem__, torch.device("cpu"), window), pages=4000)


def our_step(engine: Engine, batch: int, context: int) -> Callable[[], None]:
    """Return what makes one step of so many sessions behind their prompts."""
    for id in range(batch):
        engine.open(id, GREEDY)
        engine.submit(id, 0, prompt_of(id, context), None, samples=True)
    drawn = list[Any]()
    while engine.waiting_tokens:
        drawn += [output for output in engine.step() if output.token is not None]

    def step() -> None:
        for output in drawn:
            engine.submit(output.session, engine.have(output.session), [output.token], None, samples=True)
        drawn.clear()
        while engine.waiting_tokens:
            drawn.extend(engine.step())

    return step


def their_step(model: Any, batch: int, context: int) -> Callable[[], None]:
    ids = torch.tensor([prompt_of(number, context) for number in range(batch)], device=model.device)
    out = model(ids, use_cache=True, logits_to_keep=1)

    def step() -> None:
        nonlocal out
        ids = out.logits[:, -1].argmax(-1, keepdim=True)
        out = model(ids, past_key_values=out.past_key_values, use_cache=True)
        out.logits[:, -1].argmax(-1).tolist()

    return step


def in_turn(
    acts: Sequence[Callable[[], object]], slices: int, steps: int, clock: Callable[[], float] = time.process_time
) -> list[float]:
    """Return the median time of each act in seconds, the processor's unless `clock` is another."""
    found: list[list[float]] = [[] for _ in acts]
    for index in range(slices + 1):
        for act, times in zip(acts, found, strict=True):
            began = clock()
            for _ in range(steps):
                act()
            if index:  # the first slice warms up
                times.append((clock() - began) / steps)
    return [statistics.median(times) for times in found]


def _row(size: str, batch: int, context: int, ours: float, theirs: float, sweep: float, weights: int) -> dict[str, Any]:
    limit = weights / (_SWEEP_FLOATS / sweep)
    return {
        "size": size,
        "batch": batch,
        "context": context,
        "ours_ms": round(1000 * ours, 3),
        "transformers_ms": round(1000 * theirs, 3),
        "ratio": round(theirs / ours, 2),
        "aim": AIMS.get((size, batch, context)),
        "tokens_s": round(batch / ours, 1),
        "limit_ms": round(1000 * limit, 3),
        "of_limit": round(limit / ours, 2),
    }


@torch.inference_mode()
def measure(size: str) -> list[dict[str, Any]]:
    """Measure one model in all its shapes, and the prefill."""
    torch.set_num_threads(1)
    data, rows = torch.ones(_SWEEP_FLOATS), []
    with tempfile.TemporaryDirectory() as folder:
        reference = write_model(Path(folder), size)
        engine = _engine(reference, Path(folder))
    weights = sum(p.numel() for p in reference.parameters()) - reference.model.embed_tokens.weight.numel()
    for batch, context in SHAPES[size]:
        acts = [our_step(engine, batch, context), their_step(reference, batch, context)]
        ours, theirs = in_turn(acts, _SLICES, _STEPS)
        [sweep] = in_turn([data.sum], 5, 1)
        rows.append(_row(size, batch, context, ours, theirs, sweep, weights))
        for id in range(batch):
            engine.close(id)
    prompt = prompt_of(1, _PREFILL)

    def prefill() -> None:
        engine.open(0, GREEDY)
        engine.submit(0, 0, prompt, None, samples=True)
        while engine.waiting_tokens:
            engine.step()
        engine.close(0)

    ids = torch.tensor([prompt])
    ours, theirs = in_turn([prefill, lambda: reference(ids, use_cache=True, logits_to_keep=1)], 5, 1)
    told = {"ours_ms": round(1000 * ours, 1), "transformers_ms": round(1000 * theirs, 1)}
    return [*rows, {"size": size, "prefill": _PREFILL, **told, "ratio": round(theirs / ours, 2)}]


def show(rows: Sequence[dict[str, Any]]) -> None:
    """Print the table."""
    print("Milliseconds of one thread a step, in turn with transformers; the limit reads the weights once.")
    names = f"{'ours':>8} {'transf.':>8} {'ratio':>6} {'aim':>5} {'limit':>7}  of it"
    print(f"{'size':>5} {'batch':>6} {'context':>8} {names}")
    for row in rows:
        ours, theirs, ratio = row["ours_ms"], row["transformers_ms"], row["ratio"]
        if "prefill" in row:
            print(f"{row['size']:>5} a prompt of {row['prefill']:>3} {ours:8.1f} {theirs:8.1f} {ratio:6.2f}")
            continue
        aim = f"{row['aim']:.1f}" if row["aim"] else ""
        print(
            f"{row['size']:>5} {row['batch']:6} {row['context']:8} {ours:8.2f} {theirs:8.2f} {ratio:6.2f} {aim:>5}"
            f" {row['limit_ms']:7.2f}  {row['of_limit']:.2f}"
        )
