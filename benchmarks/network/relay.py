"""A relay of ours beside go-libp2p's (hivemind's daemon): reserving, calling through it, latency, throughput, CPU.

    python benchmarks/network/relay.py [--runs 5] [--mib 32] [--rival go] [--json FILE]

The relay, the peer behind it and its caller are processes on 127.0.0.1, and the two peers stay on the relay. The runs
of both relays take turns. CPU is that of the relay's process while the payload passes.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import trio
from libp2p.peer.id import ID

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from dataclasses import replace

from benchmarks.common.options import add_json, write_results
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.method import Call, Method
from peer.net.nat import circuit_relay
from peer.net.nat.traversal import Traversal
from peer.net.reach import LOCAL
from peer.net.relay.ledger import RelayLimits
from peer.net.relay.server import open_relay
from tests.support.nat.go_relay import open_go_relay

ECHOES = 200
FIGURES = ("reserve ms", "call through ms", "echo of 1 KB ms", "MB/s", "relay CPU s")


class Nothing(msgspec.Struct, frozen=True):
    pass


class Sent(msgspec.Struct, frozen=True):
    size_bytes: int


ECHO: Method[Nothing, Nothing] = Method("relay/echo", Nothing, Nothing, 1 << 10, 1 << 10)
PUT: Method[Nothing, Sent] = Method("relay/put", Nothing, Sent, 1 << 30)


async def _run_relay(kind: str) -> None:
    if kind == "go":
        async with open_go_relay() as rival:
            print(rival.process.pid, rival.address, flush=True)
            await trio.sleep_forever()
    async with open_relay(Identity.generate(), LOCAL, RelayLimits()) as ours:
        print(os.getpid(), ours.addresses[0], flush=True)
        await trio.sleep_forever()


@asynccontextmanager
async def _host(*relays: str) -> AsyncIterator[Host]:
    config = open_host(
        identity=Identity.generate(), events=EventLog(), reach=replace(LOCAL, relays=relays), bulk_port=None
    )
    async with config as host:
        yield host


async def _run_hidden(relay: str) -> None:
    Traversal._seek_direct = _seek_nothing  # type: ignore[method-assign]
    placed = trio.Event()
    async with _host(relay) as host:
        host.rpc.register(ECHO, _echo)
        host.rpc.register(PUT, _put)
        host.traversal.changed = placed.set
        while not host.traversal.addresses:
            await placed.wait()
        print(next(address for address in host.addresses if "/p2p-circuit/" in address), flush=True)
        await trio.sleep_forever()


async def _seek_nothing(self: Traversal, peer: ID) -> None:
    """Stay on the relay."""


async def _echo(call: Call[Nothing]) -> tuple[Nothing, memoryview]:
    return call.body, call.payload


async def _put(call: Call[Nothing]) -> Sent:
    return Sent(len(call.payload))


async def _measure(relay: str, pid: int, hidden: str, size_bytes: int) -> dict[str, float]:
    relay_id = ID.from_base58(relay.rpartition("/")[2])
    peer = hidden.rpartition("/")[2]
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(_host())
        began = time.perf_counter()
        await host._connections.dial(str(relay_id), (relay.rpartition("/p2p/")[0],))
        await circuit_relay.reserve(host.libp2p, relay_id)
        reserve_s = time.perf_counter() - began

        began = time.perf_counter()
        await host.connect_address(hidden, timeout_s=30)
        dial_s = time.perf_counter() - began

        echoes = []
        for _ in range(ECHOES):
            began = time.perf_counter()
            await host.rpc.call(peer, ECHO, Nothing(), bytes(1 << 10), timeout_s=30)
            echoes.append(time.perf_counter() - began)

        await host.rpc.call(peer, PUT, Nothing(), bytes(1 << 20), timeout_s=60)  # opens what payloads take
        cpu_s, began = _cpu_s(pid), time.perf_counter()
        sent = await host.rpc.call(peer, PUT, Nothing(), bytes(size_bytes), timeout_s=300)
        put_s, cpu_s = time.perf_counter() - began, _cpu_s(pid) - cpu_s
        assert sent.body.size_bytes == size_bytes and host.path(peer) == "relayed"
    figures = (reserve_s * 1e3, dial_s * 1e3, statistics.median(echoes) * 1e3, size_bytes / put_s / 1e6, cpu_s)
    return dict(zip(FIGURES, figures, strict=True))


def _cpu_s(pid: int) -> float:
    times = psutil.Process(pid).cpu_times()
    return times.user + times.system


@contextmanager
def _process(*arguments: str) -> Iterator[str]:
    """Run this program in another role; yields its first line."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()


def _one_run(kind: str, size_bytes: int) -> dict[str, float]:
    with _process("--as-relay", kind) as told:
        pid, relay = told.split()
        with _process("--as-hidden", relay) as hidden:
            return trio.run(_measure, relay, int(pid), hidden, size_bytes)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--mib", type=int, default=32, help="size of the payload")
    parser.add_argument("--rival", choices=["go", "none"], default="go")
    parser.add_argument("--as-relay", help=argparse.SUPPRESS)
    parser.add_argument("--as-hidden", help=argparse.SUPPRESS)
    add_json(parser, "relay")
    options = parser.parse_args()
    if options.as_relay:
        trio.run(_run_relay, options.as_relay)
    if options.as_hidden:
        trio.run(_run_hidden, options.as_hidden)
    kinds = ["ours"] + [options.rival] * (options.rival != "none")
    runs: dict[str, list[dict[str, float]]] = {kind: [] for kind in kinds}
    for _ in range(options.runs):
        for kind in kinds:
            runs[kind].append(_one_run(kind, options.mib << 20))
    figures: dict[str, Any] = {
        kind: {name: statistics.median(run[name] for run in runs[kind]) for name in FIGURES} for kind in kinds
    }
    print(f"{'':18}" + "".join(f"{kind:>10}" for kind in kinds))
    for name in FIGURES:
        print(f"{name:18}" + "".join(f"{figures[kind][name]:10.2f}" for kind in kinds))
    if options.json:
        write_results(options.json, {"medians": figures, "runs": runs})


if __name__ == "__main__":
    main()
