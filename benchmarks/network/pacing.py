"""The round trip of a flow beside a bulk transfer on one link, while the flow is held, which paces it, and while not.

    python benchmarks/network/pacing.py [--mbit 100] [--seconds 10] [--runs 3] [--json [FILE]]

Two hosts behind links of --mbit (namespaces, tbf, cubic; root). "Foreign": another process fills the link as well, by a
plain TCP connection, and pacing must not give it our share. Medians of --runs.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.common.shaped_lan import Lan, sent_over_link, shaped_lan
from benchmarks.network import flow as messages
from peer.events import EventLog
from peer.identity import Identity
from peer.net.flow.flow import Flow
from peer.net.host import Host, open_host
from peer.net.reach import Reach

SETTLE_S = 8.0
FLOODED = 24  # MiB that a flood has sent before anything is measured
WAYS = ("unpaced", "paced", "unpaced foreign", "paced foreign")


def acked(host: Host) -> int:
    """Return the bytes that the other side has acknowledged on all bulk connections."""
    return sum(one.acked_bytes() for one in host._bulk.sockets)


def drain(ip: str) -> None:
    """Read what comes over connections, one after the other."""
    with socket.create_server((ip, 0)) as listener:
        print(listener.getsockname()[1], flush=True)
        while True:
            connection, _ = listener.accept()
            with connection, suppress(ConnectionResetError):
                while connection.recv(1 << 16):
                    pass


def flood(ip: str, port: int) -> None:
    with socket.create_connection((ip, port)) as connection:
        for number in count():
            connection.sendall(bytes(1 << 20))
            if number == FLOODED:
                print("it fills the link", flush=True)


@contextmanager
def process(command: list[str]) -> Iterator[str]:
    """Run a process for the block; yields its first line."""
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:
        try:
            assert started.stdout is not None
            yield started.stdout.readline()
        finally:
            started.kill()


async def trips(flow: Flow, handler: messages.Handler, seconds: float) -> dict[str, float]:
    """Send 1 KB there and back every 4 ms; return the round trips in ms."""
    times, payload, began = list[float](), os.urandom(1 << 10), time.perf_counter()
    for number in count():
        await trio.sleep(max(0.0, began + number * messages.COLD_S - time.perf_counter()))
        start = time.perf_counter()
        if start - began > seconds:
            break
        handler.came = trio.Event()
        flow.send(messages.Note(1), payload)
        await handler.came.wait()
        times.append(1e3 * (time.perf_counter() - start))
    times.sort()
    return {"p50_ms": statistics.median(times), "p95_ms": times[int(0.95 * len(times))]}


async def caller(address: str, ip: str, way: str, seconds: float, drain_port: int) -> dict[str, Any]:
    own = open_host(identity=Identity.generate(), events=EventLog(), reach=Reach((f"/ip4/{ip}/tcp/0",)))
    async with own as host:
        peer = await host.connect_address(address, timeout_s=60)
        handler = messages.Handler(answers=False)
        host.flows.serve(handler)
        flow = await host.flows.open(peer)
        with ExitStack() as stack:
            if not way.startswith("unpaced"):
                stack.enter_context(flow.hold())
            found: dict[str, Any] = {"alone": await trips(flow, handler, seconds)}
            if way.endswith("foreign"):
                there = address.split("/")[2]
                stack.enter_context(process([sys.executable, __file__, "--flood", there, str(drain_port)]))
            async with trio.open_nursery() as nursery:
                nursery.start_soon(messages.transfer, host, peer)
                await trio.sleep(SETTLE_S)
                before, sent, began = acked(host), sent_over_link(os.getpid()), time.perf_counter()
                found["beside"] = await trips(flow, handler, seconds)
                passed_s = time.perf_counter() - began
                found["bulk_mbit"] = 8e-6 * (acked(host) - before) / passed_s
                found["link_mbit"] = 8e-6 * (sent_over_link(os.getpid()) - sent) / passed_s
                nursery.cancel_scope.cancel()
        return found


def measure(lan: Lan, ways: Sequence[str], seconds: float) -> dict[str, Any]:
    """Return the figures of each way."""
    figures: dict[str, Any] = {}
    serving = lan.at_host(1, sys.executable, str(messages.__file__), "--serve", lan.ip(1), "bulk")
    draining = lan.at_host(1, sys.executable, __file__, "--drain", lan.ip(1))
    with process(serving) as hello, process(draining) as port:
        address = json.loads(hello)["address"]
        for way in ways:
            command = [sys.executable, __file__, "--call", address, lan.ip(0), way, port.strip()]
            command = lan.at_host(0, *command, "--seconds", str(seconds))
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            figures[way] = json.loads(done.stdout)
            print(described(way, figures[way]), flush=True)
    return figures


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the median of each figure."""
    return {
        name: middle([run[name] for run in runs])
        if isinstance(runs[0][name], dict)
        else statistics.median(run[name] for run in runs)
        for name in runs[0]
    }


def described(way: str, row: dict[str, Any]) -> str:
    alone, beside = row["alone"], row["beside"]
    return (
        f"{way:16} alone {alone['p50_ms']:.2f} ms (p95 {alone['p95_ms']:.2f}), beside a transfer"
        f" {beside['p50_ms']:.2f} ms (p95 {beside['p95_ms']:.2f}), which had {row['bulk_mbit']:.1f} of"
        f" {row['link_mbit']:.1f} Mbit/s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    for hidden, arguments in (("--call", 4), ("--drain", 1), ("--flood", 2)):
        parser.add_argument(hidden, nargs=arguments, help=argparse.SUPPRESS)
    add_json(parser, "serving/pacing")
    options = parser.parse_args()
    if options.call:
        address, ip, way, port = options.call
        print(json.dumps(trio.run(caller, address, ip, way, options.seconds, int(port))))
    elif options.drain:
        drain(*options.drain)
    elif options.flood:
        flood(options.flood[0], int(options.flood[1]))
    else:
        with shaped_lan(2, options.mbit) as lan:
            runs = [measure(lan, options.ways, options.seconds) for _ in range(options.runs)]
        figures = middle(runs)
        print("medians")
        for way, row in figures.items():
            print(described(way, row))
        if options.json:
            write_results(options.json, {"mbit": options.mbit, "seconds": options.seconds, "ways": figures})


if __name__ == "__main__":
    main()
