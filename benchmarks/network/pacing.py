"""The round trip of a flow beside a bulk transfer on one link, with the transfer paced by that round trip and without.

    python benchmarks/network/pacing.py [--mbit 100] [--seconds 10] [--json FILE]

Two hosts behind links of --mbit (namespaces, tbf, cubic; root). The pace (SO_MAX_PACING_RATE of the bulk connections)
is set here, not by the product: down by 8 % while the median of the last five beats is 3 ms above the shortest, never
below half of the highest rate that was seen, and up by 3 % while it is less than 1.5 ms above.
On two busy cores (2026-11-26): alone 0.4 ms; beside a transfer 12.2 ms unpaced at 95 Mbit/s, 0.4 ms paced at 80 Mbit/s.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import struct
import subprocess
import sys
import time
from collections import deque
from itertools import count
from pathlib import Path
from typing import Any

import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.common.shaped_lan import shaped_lan
from benchmarks.network import flow as messages
from peer.events import EventLog
from peer.identity import Identity
from peer.net.flow.flow import BEAT_S, Flow
from peer.net.host import Host, HostConfig, open_host

MAX_PACING_RATE = 47  # of Linux; Python has no name for it
UNPACED = (1 << 32) - 1
BYTES_ACKED_AT = 120  # in tcp_info
TCP_INFO_BYTES = 232
WINDOW_S = 1.0
SETTLE_S = 8.0


def bulk_sockets(host: Host) -> list[Any]:
    return [link._tls._socket for links in host._bulk._links.values() for link in links]


def acked(host: Host) -> int:
    """Return the bytes that the other side has acknowledged on all bulk connections."""
    infos = [one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, TCP_INFO_BYTES) for one in bulk_sockets(host)]
    return sum(struct.unpack_from("=Q", info, BYTES_ACKED_AT)[0] for info in infos)


async def pace(host: Host, flow: Flow) -> None:
    """Set the pace of the bulk connections by the flow's round trips, until cancelled."""
    rate, peak, seen = float(UNPACED), 0.0, deque[tuple[float, int]]()
    shortest_s = min(flow.round_trips)
    while True:
        await trio.sleep(BEAT_S)
        seen.append((time.perf_counter(), acked(host)))
        if seen[-1][0] - seen[0][0] < WINDOW_S:
            continue
        began = seen.popleft()
        now = (seen[-1][1] - began[1]) / (seen[-1][0] - began[0])
        peak = max(peak, now)
        above_s = statistics.median(list(flow.round_trips)[-5:]) - shortest_s
        if above_s > 0.003:
            rate = max(peak / 2, 0.92 * min(rate, now))
        elif above_s < 0.0015 and now > 0.8 * rate:
            rate *= 1.03
        for one in bulk_sockets(host):
            one.setsockopt(socket.SOL_SOCKET, MAX_PACING_RATE, min(UNPACED, int(rate)))


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


async def caller(address: str, ip: str, paced: bool, seconds: float) -> dict[str, Any]:
    own = HostConfig(identity=Identity.generate(), events=EventLog(), listen=(f"/ip4/{ip}/tcp/0",))
    async with open_host(own) as host:
        peer = await host.connect_address(address, timeout_s=60)
        handler = messages.Handler(answers=False)
        host.flows.serve(handler)
        flow = await host.flows.open(peer)
        with flow.hold():
            found: dict[str, Any] = {"alone": await trips(flow, handler, seconds)}
            async with trio.open_nursery() as nursery:
                nursery.start_soon(messages.transfer, host, peer)
                if paced:
                    nursery.start_soon(pace, host, flow)
                await trio.sleep(SETTLE_S)
                before, began = acked(host), time.perf_counter()
                found["beside"] = await trips(flow, handler, seconds)
                found["bulk_mbit"] = 8e-6 * (acked(host) - before) / (time.perf_counter() - began)
                nursery.cancel_scope.cancel()
        return found


def measure(mbit: float, seconds: float) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    with shaped_lan(2, mbit) as lan:
        serving = lan.at_host(1, sys.executable, str(messages.__file__), "--serve", lan.ip(1), "bulk")
        with subprocess.Popen(serving, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
            try:
                assert server.stdout is not None
                address = json.loads(server.stdout.readline())["address"]
                for way in ("unpaced", "paced"):
                    command = [sys.executable, __file__, "--call", address, lan.ip(0), way, "--seconds", str(seconds)]
                    done = subprocess.run(lan.at_host(0, *command), stdout=subprocess.PIPE, text=True, check=True)
                    figures[way] = json.loads(done.stdout)
            finally:
                server.kill()
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement")
    parser.add_argument("--call", nargs=3, help=argparse.SUPPRESS)
    add_json(parser, "pacing")
    options = parser.parse_args()
    if options.call:
        address, ip, way = options.call
        print(json.dumps(trio.run(caller, address, ip, way == "paced", options.seconds)))
        return
    figures = measure(options.mbit, options.seconds)
    for way, row in figures.items():
        alone, beside = row["alone"], row["beside"]
        print(
            f"{way:8} alone {alone['p50_ms']:.2f} ms (p95 {alone['p95_ms']:.2f}), beside a transfer"
            f" {beside['p50_ms']:.2f} ms (p95 {beside['p95_ms']:.2f}), which had {row['bulk_mbit']:.1f} Mbit/s"
        )
    if options.json:
        write_results(options.json, {"mbit": options.mbit, "seconds": options.seconds, "ways": figures})


if __name__ == "__main__":
    main()
