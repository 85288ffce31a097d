"""Tokens a second of a served model, beside the same model in one process of `transformers`.

    python benchmarks/serving/inference.py [--sizes 10M 100M] [--servers 2] [--tokens 128] [--json [FILE]]

Servers of one thread each on 127.0.0.1, two unless --servers says otherwise, hold equal parts of a random fp32 Llama:
10M (8 layers, width 256) and 100M (12 layers, width 768), 8,192 words. One client process. A batch is so many sessions
of one client; four come also from a client each ("4 clients"), and as one request of the API for four answers to one
prompt ("n=4"). Local: `transformers` with one thread, generating the same number of tokens, one stream and batches.
CPU is that of each process, a token. The limit in the same run: the weights that one token reads, over the measured
rate of reading memory with one thread.

    python benchmarks/serving/inference.py --local [--sizes 10M 100M] [--json [FILE]]

The engine alone, without servers, in turn with `transformers` in one process of one thread.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.serving.served_model import GREEDY, MODELS, ServedModel, generate, served_model, write_model
from swarm.gateway.asks import GenerationAsk
from swarm.gateway.choices import Told, prepare
from swarm.gateway.errors import ApiError
from swarm.gateway.template import open_template
from swarm.inference.client import ModelClient

PETALS = {"10M": {1: 53.9, 2: 78.0, 4: 91.7}, "100M": {4: 31.8}}
"""Tokens a second on two quiet cores (shared/reference/rivals.md)."""
WARM_UP = 16
AT_ONCE = 4
"""So many answers also come from a client each, and from one request."""


def prompt(number: int, length: int) -> list[int]:
    return [(31 * number + 7 * place) % 8192 for place in range(length)]


async def streams(
    models: Sequence[ModelClient], served: ServedModel, count: int, context: int, tokens: int
) -> dict[str, Any]:
    """Generate with so many sessions of these clients at once; return tokens a second, times and CPU."""
    times: dict[int, list[float]] = {}
    sessions = [models[number % len(models)].session(GREEDY) for number in range(count)]
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
        "way": "clients" if len(models) > 1 else "sessions",
        "context": context,
        "tokens_s": round(count * tokens / seconds, 1),
        "p50_ms": round(statistics.median(gaps), 2),
        "p95_ms": round(gaps[int(0.95 * len(gaps))], 2),
        "cpu_ms": {name: round(ms, 2) for name, ms in used.items()},
        "client_cpu_ms": round(1000 * (time.process_time() - own) / (count * tokens), 2),
    }


async def request(model: ModelClient, count: int, context: int, tokens: int) -> dict[str, Any]:
    """Ask for so many answers to one prompt, as a request of the API does; return tokens a second after the prompt."""
    ask = GenerationAsk("", GREEDY, tokens, count, (), False, False, None, prompts=(tuple(prompt(1, context)),))
    seconds = dict[int, float]()
    async with open_template(model.manifest.text) as template:
        for length in (WARM_UP, 2, tokens):
            answers = await prepare(model, template, replace(ask, count=length))
            out, told = trio.open_memory_channel[Told](0)
            began = time.perf_counter()
            async with trio.open_nursery() as nursery:
                nursery.start_soon(answers.run, trio.CapacityLimiter(count), out)
                async for part in told:
                    if isinstance(part, ApiError):
                        raise part
            seconds[length] = time.perf_counter() - began
            assert answers.usage.drawn == count * length
    rate = count * (tokens - 2) / (seconds[tokens] - seconds[2])
    return {"streams": count, "way": "request", "context": context, "tokens_s": round(rate, 1)}


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
    async with AsyncExitStack() as stack:
        models = [await stack.enter_async_context(served.client()) for _ in range(AT_ONCE)]
        model = models[0]
        for context in contexts:
            for count in (1, 2, AT_ONCE, 16):
                rows.append(await streams([model], served, count, context, tokens))
            rows.append(await streams(models, served, AT_ONCE, context, tokens))
            rows.append(await request(model, AT_ONCE, context, tokens))
        rows.append({"prefill": 512, "first_token_s": round(await prefill(model, 512), 4)})
    return rows


def parts(layers: int, servers: int) -> dict[str, str]:
    """Return the blocks of each server by its name."""
    cuts = [layers * number // servers for number in range(servers + 1)]
    return {chr(ord("a") + number): f"{first}:{end}" for number, (first, end) in enumerate(pairwise(cuts))}


def bench(size: str, contexts: list[int], tokens: int, servers: int) -> list[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as folder:
        reference = write_model(Path(folder) / "checkpoint", size)
        torch.set_num_threads(1)
        parameters = sum(p.numel() for p in reference.parameters()) - reference.model.embed_tokens.weight.numel()
        beside = {
            (context, count): local(reference, count, context, tokens)
            for context in contexts
            for count in (1, AT_ONCE, 16)
        }
        limit = memory_limit(parameters)
        with served_model(Path(folder), **parts(MODELS[size]["num_hidden_layers"], servers)) as served:
            rows = trio.run(measure, served, contexts, tokens)
    print(f"\n{size}: {parameters / 1e6:.1f}M parameters a token; one thread reads them {limit:.0f} times a second")
    show(rows, beside, size, servers)
    return rows


def show(rows: list[dict[str, Any]], beside: dict[tuple[int, int], float], size: str, servers: int) -> None:
    """Print the rows, and add to each what it stands beside."""
    names = f"{'context':>8} {'streams':>9} {'tokens/s':>9} {'p50 ms':>7} {'p95 ms':>7} {'local':>7} {'ratio':>6}"
    print(f"{names} {'Petals x':>8}  CPU ms a token")
    for row in rows:
        row |= {"size": size, "servers": servers}
        if "prefill" in row:
            print(f"first token behind a prompt of {row['prefill']}: {row['first_token_s']:.3f} s")
            continue
        count, context = row["streams"], row["context"]
        row["local_tokens_s"] = round(beside[context, count if count in (1, 16) else AT_ONCE], 1)
        ratio = row["tokens_s"] / row["local_tokens_s"] if row["local_tokens_s"] else 0.0
        petals = row["tokens_s"] / PETALS[size][count] if count in PETALS.get(size, {}) else 0.0
        named = {"sessions": f"{count}", "clients": f"{count} clients", "request": f"n={count}"}[row["way"]]
        gaps, cpu = f"{'':7} {'':7}", ""
        if "cpu_ms" in row:
            gaps = f"{row['p50_ms']:7.2f} {row['p95_ms']:7.2f}"
            cpu = " ".join(f"{name} {ms:.2f}" for name, ms in row["cpu_ms"].items())
            cpu += f" client {row['client_cpu_ms']:.2f}"
        print(
            f"{context:8} {named:>9} {row['tokens_s']:9.1f} {gaps}"
            f" {row['local_tokens_s']:7.1f} {ratio:6.2f} {petals:8.2f}  {cpu}".rstrip()
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", nargs="+", choices=["10M", "100M"], default=["10M", "100M"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[128, 1024])
    parser.add_argument("--servers", type=int, choices=range(1, 9), default=2)
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
    rows = [row for size in options.sizes for row in bench(size, options.contexts, options.tokens, options.servers)]
    if options.json:
        write_results(options.json, rows)


if __name__ == "__main__":
    main()
