"""Tokens a second of a served model, beside the same model in one process of `transformers`.

    python benchmarks/serving/inference.py [--sizes 10M 100M] [--tokens 128] [--json [FILE]]

Two servers of one thread each on 127.0.0.1 hold one half of a random fp32 Llama each: 10M (8 layers, width 256) and
100M (12 layers, width 768), 8,192 words. One client process. Local: `transformers` with one thread, generating the same
number of tokens, one stream and batches. CPU is that of each process, a token. The limit in the same run: the weights
that one token reads, over the measured rate of reading memory with one thread.

    python benchmarks/serving/inference.py --local [--sizes 10M 100M] [--json [FILE]]

The engine alone, without servers, in turn with `transformers` in one process of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.serving.served_model import GREEDY, MODELS, ServedModel, generate, served_model, write_model
from swarm.inference.client import ModelClient

PETALS = {"10M": {1: 53.9, 2: 78.0, 4: 91.7}, "100M": {4: 31.8}}
"""Tokens a second on two quiet cores (shared/reference/rivals.md)."""
WARM_UP = 16


def prompt(number: int, length: int) -> list[int]:
    return [(31 * number + 7 * place) % 8192 for place in range(length)]


async def streams(model: ModelClient, served: ServedModel, count: int, context: int, tokens: int) -> dict[str, Any]:
    """Generate with so many clients' sessions at once; return tokens a second, times and CPU."""
    times: dict[int, list[float]] = {}
    sessions = [model.session(GREEDY) for _ in range(count)]
    for session in sessions:  # the prompt is not part of the measurement
        async for _ in session.generate(prompt(id(session), context), WARM_UP):
            pass
    before, own, began = served.cpu_s(), time.process_time(), time.perf_counter()

    async def one(number: int) -> None:
        _, times[number] = await generate(sessions[number], [1], tokens)

    async with trio.open_nursery() as nursery:
        for number in range(count):
            nursery.start_soon(one, number)
    seconds, after = time.perf_counter() - began, served.cpu_s()
    for session in sessions:
        session.close()
    gaps = sorted(1000 * (b - a) for found in times.values() for a, b in pairwise(found))
    used = {name: 1000 * (after[name] - before[name]) / (count * tokens) for name in before}
    return {
        "streams": count,
        "context": context,
        "tokens_s": round(count * tokens / seconds, 1),
        "p50_ms": round(statistics.median(gaps), 2),
        "p95_ms": round(gaps[int(0.95 * len(gaps))], 2),
        "cpu_ms": {name: round(ms, 2) for name, ms in used.items()},
        "client_cpu_ms": round(1000 * (time.process_time() - own) / (count * tokens), 2),
    }


async def prefill(model: ModelClient, length: int) -> float:
    """Return the seconds to the first token behind a prompt."""
    session = model.session(GREEDY)
    began = time.perf_counter()
    async for _ in session.generate(prompt(length, length), 1):
        pass
    session.close()
    return time.perf_counter() - began


def local(model: Any, count: int, context: int, tokens: int) -> float:
    """Return the tokens a second of `transformers` in this process, one thread, a batch of `count`."""
    ids = torch.tensor([prompt(number, context) for number in range(count)])
    options: dict[str, Any] = {"do_sample": False, "attention_mask": torch.ones_like(ids)}
    with torch.inference_mode():
        model.generate(ids, max_new_tokens=4, min_new_tokens=4, **options)
        began = time.perf_counter()
        model.generate(ids, max_new_tokens=2, min_new_tokens=2, **options)
        first_s = time.perf_counter() - began
        model.generate(ids, max_new_tokens=tokens, min_new_tokens=tokens, **options)
        return count * (tokens - 2) / (time.perf_counter() - began - 2 * first_s)


def memory_limit(parameters: int) -> float:
    """Return the tokens a second at which one thread reads all fp32 parameters once a token."""
    data = torch.ones(64 << 20)
    best = 1e9
    for _ in range(5):
        began = time.perf_counter()
        data.sum()
        best = min(best, time.perf_counter() - began)
    return (data.numel() / best) / parameters


async def measure(served: ServedModel, contexts: list[int], tokens: int) -> list[dict[str, Any]]:
    rows = []
    async with served.client() as model:
        for context in contexts:
            for count in (1, 2, 4, 16):
                rows.append(await streams(model, served, count, context, tokens))
        rows.append({"prefill": 512, "first_token_s": round(await prefill(model, 512), 4)})
    return rows


def bench(size: str, contexts: list[int], tokens: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        reference = write_model(Path(folder) / "checkpoint", size)
        torch.set_num_threads(1)
        parameters = sum(p.numel() for p in reference.parameters()) - reference.model.embed_tokens.weight.numel()
        beside = {
            (context, count): local(reference, count, context, tokens) for context in contexts for count in (1, 4, 16)
        }
        limit = memory_limit(parameters)
        layers = MODELS[size]["num_hidden_layers"]
        with served_model(Path(folder), a=f"0:{layers // 2}", b=f"{layers // 2}:{layers}") as served:
            rows = trio.run(measure, served, contexts, tokens)
    print(f"\n{size}: {parameters / 1e6:.1f}M parameters a token; one thread reads them {limit:.0f} times a second")
    names = f"{'context':>8} {'streams':>8} {'tokens/s':>9} {'p50 ms':>7} {'p95 ms':>7} {'local':>7} {'ratio':>6}"
    print(f"{names} {'Petals x':>8}  CPU ms a token")
    for row in rows:
        row["size"] = size
        if "prefill" in row:
            print(f"first token behind a prompt of {row['prefill']}: {row['first_token_s']:.3f} s")
            continue
        count, context = row["streams"], row["context"]
        row["local_tokens_s"] = round(
            beside.get((context, 4 if count > 1 else 1) if count != 16 else (context, 16), 0.0), 1
        )
        ratio = row["tokens_s"] / row["local_tokens_s"] if row["local_tokens_s"] else 0.0
        petals = row["tokens_s"] / PETALS[size][count] if count in PETALS.get(size, {}) else 0.0
        cpu = " ".join(f"{name} {ms:.2f}" for name, ms in row["cpu_ms"].items())
        print(
            f"{context:8} {count:8} {row['tokens_s']:9.1f} {row['p50_ms']:7.2f} {row['p95_ms']:7.2f}"
            f" {row['local_tokens_s']:7.1f} {ratio:6.2f} {petals:8.2f}  {cpu} client {row['client_cpu_ms']:.2f}"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=list(MODELS), default=["10M", "100M"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--local", action="store_true", help="the engine alone, in this process")
    name = "serving/local" if "--local" in sys.argv else "serving/inference"
    add_json(parser, name)
    options = parser.parse_args()
    if options.local:
        from benchmarks.serving import local_engine

        found = [row for size in options.sizes for row in local_engine.measure(size)]
        local_engine.show(found)
        if options.json:
            write_results(options.json, found)
        return
    rows = [row for size in options.sizes for row in bench(size, options.contexts, options.tokens)]
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
