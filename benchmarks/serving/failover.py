"""Servers that are killed or frozen in the middle of answers: does the same answer come, and how long does it stall?

    python benchmarks/serving/failover.py [--kills 20] [--stops 10] [--tokens 200] [--json [FILE]]

Three servers hold a 10M Llama (blocks 0:3, 3:6, 6:8). At a random token the first, middle or last one gets SIGKILL or
SIGSTOP. One spare of the same blocks takes over, or two that split them. The answer must be that of an undisturbed run.
The stall is the longest time between two tokens, the replay of what was computed included. In the same run: the stall
that a lost server costs at least, which is the time until it is known (beats and a ping of the flow).
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.serving.served_model import GREEDY, ServedModel, generate, served_model, write_model
from peer.errors import BarnraiseError
from swarm.inference.client import ModelClient

SPANS = {"a": (0, 3), "b": (3, 6), "c": (6, 8)}
PLACES = {"first": 0, "middle": 1, "last": 2}


async def run(
    served: ServedModel, strikes: list[tuple[str, int]], tokens: int, chance: random.Random
) -> list[dict[str, Any]]:
    """Strike once for each of `strikes`; return a row for each."""
    rows = list[dict[str, Any]]()
    async with served.client() as model:
        prompt = [chance.randrange(8192) for _ in range(64)]
        session = model.session(GREEDY)
        wanted, times = await generate(session, prompt, tokens)
        session.close()
        print(f"undisturbed: {tokens / (times[-1] - times[0]):.0f} tokens a second, longest gap {longest(times):.3f} s")
        for number, (place, how) in enumerate(strikes):
            split = number % 2 == 1
            await spares(served, model, place, split, number)
            rows.append(await strike(served, model, place, how, prompt, wanted, chance))
            rows[-1]["split"] = split
            print(row_text(number, rows[-1]), flush=True)
    return rows


async def spares(served: ServedModel, model: ModelClient, place: str, split: bool, number: int) -> None:
    """Have one server of each range, and a spare, whole or in two, of the one that will be struck."""
    name = list(SPANS)[PLACES[place]]
    first, end = SPANS[name]
    parts = [(first, first + 1), (first + 1, end)] if split else [(first, end)]
    for index, (a, b) in enumerate(parts):
        await trio.to_thread.run_sync(served.serve, f"{name}-{number}-{index}", f"{a}:{b}")
    await served.known(model)


async def strike(
    served: ServedModel,
    model: ModelClient,
    place: str,
    how: int,
    prompt: list[int],
    wanted: list[int],
    chance: random.Random,
) -> dict[str, Any]:
    """Generate and strike the server at `place` at a random token."""
    at = chance.randrange(10, len(wanted) - 10)
    session = model.session(GREEDY)
    tokens, times, struck_at, victim = list[int](), list[float](), 0.0, None
    try:
        with trio.fail_after(60):
            async for drawn in session.generate(prompt, len(wanted)):
                tokens.append(drawn.token)
                times.append(time.perf_counter())
                if len(tokens) == at:
                    span = SPANS[list(SPANS)[PLACES[place]]]
                    hop = next(hop for hop in session.route if hop.first >= span[0])
                    victim = served.servers[model.servers.records[hop.peer].name]
                    victim.process.send_signal(how)
                    struck_at = time.perf_counter()
        error = ""
    except (BarnraiseError, trio.TooSlowError) as failure:  # a lost answer is a result
        error = f"{type(failure).__name__}: {failure}"
    session.close()
    if victim is not None:
        victim.kill()
    return {
        "place": place,
        "signal": signal.Signals(how).name,
        "token": at,
        "same": tokens == wanted,
        "stall_s": round(longest([struck_at, *[t for t in times if t > struck_at]]), 4) if struck_at else 0.0,
        "failovers": session.failovers,
        "error": error,
    }


def longest(times: list[float]) -> float:
    return max((b - a for a, b in pairwise(times)), default=0.0)


def row_text(number: int, row: dict[str, Any]) -> str:
    spare = "two spares" if row["split"] else "one spare"
    end = "same tokens" if row["same"] else f"OTHER TOKENS {row['error']}"
    return f"{number + 1:3} {row['place']:6} {row['signal']} {spare:10} stall {row['stall_s']:.3f} s  {end}"


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {"answers": len(rows), "same": sum(row["same"] for row in rows)}
    for name in ("SIGKILL", "SIGSTOP"):
        stalls = sorted(row["stall_s"] for row in rows if row["signal"] == name)
        if stalls:
            found[f"{name} stall_s"] = {
                "p50": statistics.median(stalls),
                "p95": stalls[min(len(stalls) - 1, int(0.95 * len(stalls)))],
                "most": stalls[-1],
            }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=10)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    add_json(parser, "serving/failover")
    options = parser.parse_args()
    chance = random.Random(options.seed)
    strikes = [(chance.choice(list(PLACES)), signal.SIGKILL) for _ in range(options.kills)]
    strikes += [(chance.choice(list(PLACES)), signal.SIGSTOP) for _ in range(options.stops)]
    chance.shuffle(strikes)
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder) / "checkpoint", "10M")
        spans = {name: f"{first}:{end}" for name, (first, end) in SPANS.items()}
        with served_model(Path(folder), **spans) as served:
            rows = trio.run(run, served, strikes, options.tokens, chance)
    found = summary(rows)
    print(found)
    if options.json:
        write_results(options.json, {"summary": found, "rows": rows})


if __name__ == "__main__":
    main()
