"""Servers that are far from each other: what a token costs, and a long prompt over a slow uplink.

    python benchmarks/serving/far.py [--delays 0 25 50] [--servers 3] [--mbit 20] [--prompt 2048] [--json [FILE]]

A 10M Llama (8 blocks, width 256, fp32) on servers of one thread each, in namespaces of their own, and a client in
another one (Linux, root). First links of 1 Gbit/s with a delay by a process that carries frames: a token passes from
server to server, and from the last to the first, which is S one-way trips and the arithmetic. The limit of the run:
S times the delay, and the same token without a delay. Then two servers behind links of `--mbit` (tbf) without a delay:
the time to the first token behind a long prompt, by the type on the wire. The limit: its hidden states over the rate.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.common.shaped_lan import Lan, Unavailable, shaped_lan
from benchmarks.serving.served_model import GREEDY, MODELS, ServedModel, generate, write_model
from cli.demo.child_processes import children
from peer.ipc.block_messages import WIRE_TYPES, row_bytes
from swarm.inference.client import ModelClient, open_model
from swarm.run.invite import Invite

FAST_MBIT = 1000.0
SIZE = "10M"
WARM_UP = 8
TOKENS = 48
CALL_S = 600.0


# -- the client, in a namespace of its own --------------------------------------------------------------------------


async def token_ms(model: ModelClient) -> dict[str, float]:
    """Return the median time between two tokens, and the slowest of twenty."""
    session = model.session(GREEDY)
    await generate(session, [1, 2, 3], WARM_UP)
    _, times = await generate(session, [4], TOKENS)
    session.close()
    gaps = sorted(1000 * (b - a) for a, b in pairwise(times))
    return {"p50_ms": round(statistics.median(gaps), 2), "p95_ms": round(gaps[int(0.95 * len(gaps))], 2)}


async def first_token_s(model: ModelClient, length: int, rounds: int) -> dict[str, list[float]]:
    """Return the seconds to the first token behind prompts, by the type on the wire, in turns."""
    found: dict[str, list[float]] = {wire: [] for wire in WIRE_TYPES}
    for number in range(rounds):
        for place, wire in enumerate(WIRE_TYPES):
            session = model.session(GREEDY, wire=wire)
            prompt = [(31 * number + 17 * place + 7 * at * at) % 8192 for at in range(length)]
            began = time.perf_counter()
            await generate(session, prompt, 1)
            found[wire].append(round(time.perf_counter() - began, 3))
            session.close()
    return found


async def client(invite: str, servers: int, prompt: int, rounds: int) -> dict[str, Any]:
    async with open_model(Invite.parse(invite)) as model:
        with trio.fail_after(60):
            while sum(record.serves(time.time()) for record in model.servers.records.values()) < servers:
                await model.servers.refresh(0.0)
                await trio.sleep(0.2)
        return {"first_token_s": await first_token_s(model, prompt, rounds)} if prompt else await token_ms(model)


# -- the servers ----------------------------------------------------------------------------------------------------


def served_over(lan: Lan, servers: int, prompt: int = 0, rounds: int = 1) -> dict[str, Any]:
    """Return the figures of a client of so many servers on this network. `prompt`: its length, 0 for tokens alone."""
    layers = MODELS[SIZE]["num_hidden_layers"]
    cuts = [layers * number // servers for number in range(servers + 1)]
    with tempfile.TemporaryDirectory() as folder, children() as group:
        write_model(Path(folder) / "checkpoint", SIZE)
        model = ServedModel(Path(folder), group)
        for number, (first, end) in enumerate(pairwise(cuts)):
            model.serve(f"s{number}", f"{first}:{end}", ip=lan.ip(number), place=at_host(lan, number))
        command = [sys.executable, __file__, "--client", str(model.invite), str(servers), str(prompt), str(rounds)]
        done = subprocess.run(lan.at_host(servers, *command), capture_output=True, text=True, timeout=CALL_S)
        if done.returncode:
            raise SystemExit(f"the client failed: {done.stderr[-2000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def at_host(lan: Lan, number: int) -> Any:
    return lambda command: lan.at_host(number, *command)


def far_tokens(delays: Sequence[float], servers: int) -> list[dict[str, Any]]:
    """Measure tokens at each one-way delay, 0 first."""
    rows = list[dict[str, Any]]()
    for delay in sorted({0.0, *delays}):
        with shaped_lan(servers + 1, FAST_MBIT, delay_ms=delay) as lan:
            rows.append({"delay_ms": delay, "servers": servers, **served_over(lan, servers)})
        alone = rows[0]["p50_ms"]
        rows[-1]["limit_ms"] = round(servers * delay + alone, 2)
        print(
            f"{servers} servers, {delay:g} ms one way: a token in {rows[-1]['p50_ms']:.1f} ms"
            f" (p95 {rows[-1]['p95_ms']:.1f}), S x delay + the same without delay {rows[-1]['limit_ms']:.1f}"
        )
    return rows


def slow_uplink(mbit: float, length: int, rounds: int) -> list[dict[str, Any]]:
    """Measure the first token behind a long prompt over two servers, without and with a slow link."""
    figures = dict[float, dict[str, list[float]]]()
    for rate in (FAST_MBIT, mbit):
        with shaped_lan(3, rate) as lan:
            figures[rate] = served_over(lan, 2, length, rounds)["first_token_s"]
    rows = list[dict[str, Any]]()
    for wire in WIRE_TYPES:
        link_s = 8e-6 * length * row_bytes(MODELS[SIZE]["hidden_size"], wire) / mbit
        fast, slow = statistics.median(figures[FAST_MBIT][wire]), statistics.median(figures[mbit][wire])
        rows.append({"wire": wire, "fast_s": fast, "slow_s": slow, "link_s": round(link_s, 3), "mbit": mbit})
        print(
            f"{length} tokens in {wire}: the first token after {slow:.2f} s at {mbit:g} Mbit/s"
            f" ({fast:.2f} s at {FAST_MBIT:g}); the hidden states alone take {link_s:.2f} s"
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--delays", nargs="*", type=float, default=[0.0, 25.0, 50.0], help="one way, in ms")
    parser.add_argument("--servers", type=int, default=3)
    parser.add_argument("--mbit", type=float, default=20.0)
    parser.add_argument("--prompt", type=int, default=2048, help="tokens; 0: no long prompt")
    parser.add_argument("--rounds", type=int, default=3, help="prompts of each type on the wire")
    parser.add_argument("--client", nargs=4, help=argparse.SUPPRESS)
    add_json(parser, "serving/far")
    options = parser.parse_args()
    if options.client:
        invite, servers, prompt, rounds = options.client
        print(json.dumps(trio.run(client, invite, int(servers), int(prompt), int(rounds))))
        return
    figures: dict[str, Any] = {}
    try:
        if options.delays:
            figures["tokens"] = far_tokens(options.delays, options.servers)
        if options.prompt:
            figures["prompts"] = slow_uplink(options.mbit, options.prompt, options.rounds)
    except Unavailable as error:
        raise SystemExit(f"no such network here: {error}") from error
    if options.json:
        write_results(options.json, figures)


if __name__ == "__main__":
    main()
