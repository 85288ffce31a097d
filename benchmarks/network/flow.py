"""What a message costs: by call, by flow, and by the ring to the worker.

    python benchmarks/network/flow.py [--messages 2000] [--mbit 100] [--json [FILE]]

Two processes on 127.0.0.1 send a message there and back. CPU is that of both processes together, half of it a message;
times are half of a round trip. "Hot" sends the next one at once, "cold" one every 4 ms, as tokens come. "Beside" is
cold, on a link of --mbit (namespaces, tbf) that a transfer of payloads fills meanwhile; flows pace it. The limit in the
same run: a plain TCP socket between the same processes, in blocking calls.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import msgspec
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from benchmarks.common.shaped_lan import Lan, Unavailable, shaped_lan
from peer.events import EventLog
from peer.identity import Identity
from peer.ipc.ring import Ring
from peer.net.flow.flow import Flow
from peer.net.host import Host, open_host
from peer.net.method import Call, Empty, Method
from peer.net.reach import Reach

SIZES = (1 << 10, 16 << 10)
COLD_S = 0.004
RING_BYTES = 1 << 20
PIECE = 8 << 20

Exchange = Callable[[bytes], Awaitable[None]]
OtherCpu = Callable[[], Awaitable[float]]
"""Returns the CPU seconds of the other process."""


class Note(msgspec.Struct, frozen=True, array_like=True, tag=1):
    number: int


class Used(msgspec.Struct, frozen=True):
    cpu_s: float


ECHO = Method("bench/echo", Note, Note, request_payload_max=PIECE, reply_payload_max=PIECE)
SINK = Method("bench/sink", Empty, Empty, request_payload_max=PIECE)
CPU = Method("bench/cpu", Empty, Used)


class Handler:
    """Answers each message, or wakes who waits for the answer."""

    types = Note
    payload_max = PIECE

    def __init__(self, answers: bool) -> None:
        self.answers, self.came = answers, trio.Event()

    async def on_message(self, flow: Flow, message: Note, payload: memoryview) -> None:
        if self.answers:
            flow.send(message, payload)
        else:
            self.came.set()

    def on_end(self, flow: Flow, reason: str) -> None:
        self.came.set()


def cpu_s() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# -- the other process ----------------------------------------------------------------------------------------------


async def serve(ip: str, bulk: bool) -> None:
    """Answer calls, flows and plain sockets until standard input ends."""
    listener = socket.create_server((ip, 0))
    threading.Thread(target=echo_plain, args=(listener,), daemon=True).start()
    config = open_host(
        identity=Identity.generate(),
        events=EventLog(),
        reach=Reach((f"/ip4/{ip}/tcp/0",)),
        bulk_port=0 if bulk else None,
    )
    async with config as host:

        async def echo(call: Call[Note]) -> tuple[Note, memoryview]:
            return call.body, call.payload

        async def sink(call: Call[Empty]) -> Empty:
            return Empty()

        async def used(call: Call[Empty]) -> Used:
            return Used(cpu_s())

        host.rpc.register(ECHO, echo)
        host.rpc.register(SINK, sink)
        host.rpc.register(CPU, used)
        host.flows.serve(Handler(answers=True))
        print(json.dumps({"address": host.addresses[0], "plain": listener.getsockname()[1]}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


def echo_plain(listener: socket.socket) -> None:
    while True:
        connection, _ = listener.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with connection:
            while data := connection.recv(1 << 16):
                connection.sendall(data)


def serve_ring(there: str, back: str) -> None:
    rings = [Ring.attach(tuple(map(int, fds.split(","))), RING_BYTES) for fds in (there, back)]  # type: ignore[arg-type]
    while True:
        for record in rings[0].take(block=True):
            if not record:
                print(cpu_s(), flush=True)
                continue
            rings[1].put(record)
        rings[0].done()


# -- measuring ------------------------------------------------------------------------------------------------------


async def timed(
    exchange: Exchange, size: int, messages: int, pause_s: float, other: Callable[[], Awaitable[float]]
) -> dict[str, float]:
    """Exchange messages; return CPU and times a message, in ms."""
    payload = os.urandom(size)
    for _ in range(50):
        await exchange(payload)
    times = []
    before = cpu_s() + await other()
    began = time.perf_counter()
    for number in range(messages):
        if pause_s:
            await trio.sleep(max(0.0, began + number * pause_s - time.perf_counter()))
        start = time.perf_counter()
        await exchange(payload)
        times.append(1e3 * (time.perf_counter() - start) / 2)
    used = cpu_s() + await other() - before
    times.sort()
    return {
        "cpu_ms": 1e3 * used / messages / 2,
        "p50_ms": statistics.median(times),
        "p99_ms": times[int(0.99 * len(times))],
    }


async def caller(address: str, plain: int, ip: str, way: str, messages: int, beside: bool) -> dict[str, Any]:
    """Measure one way to the process at `address`."""
    own = open_host(identity=Identity.generate(), events=EventLog(), reach=Reach((f"/ip4/{ip}/tcp/0",)))
    async with own as host:
        peer = await host.connect_address(address, timeout_s=60)

        async def other() -> float:
            return (await host.rpc.call(peer, CPU, Empty(), timeout_s=60)).body.cpu_s

        exchange, flow = await way_of(host, peer, address, plain, way)
        found: dict[str, Any] = {}
        with nullcontext() if flow is None else flow.hold():
            for size in SIZES:
                if beside:
                    async with trio.open_nursery() as nursery:
                        nursery.start_soon(transfer, host, peer)
                        await trio.sleep(1.0)
                        found[f"{size}"] = {"beside": await timed(exchange, size, messages, COLD_S, other)}
                        nursery.cancel_scope.cancel()
                else:
                    found[f"{size}"] = {
                        "hot": await timed(exchange, size, messages, 0.0, other),
                        "cold": await timed(exchange, size, messages, COLD_S, other),
                    }
        return found


async def way_of(host: Host, peer: str, address: str, plain: int, way: str) -> tuple[Exchange, Flow | None]:
    """Return how a message goes there and back, and the flow that it takes."""
    if way in ("call", "bulk call"):

        async def call(payload: bytes) -> None:
            await host.rpc.call(peer, ECHO, Note(1), payload, timeout_s=60, bulk=way == "bulk call")

        return call, None
    if way == "plain TCP":
        connection = socket.create_connection((address.split("/")[2], plain))
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        async def send(payload: bytes) -> None:
            connection.sendall(payload)
            left = len(payload)
            while left:
                left -= len(connection.recv(left))

        return send, None
    handler = Handler(answers=False)
    host.flows.serve(handler)
    flow = await host.flows.open(peer)

    async def ask(payload: bytes) -> None:
        handler.came = trio.Event()
        flow.send(Note(1), payload)
        await handler.came.wait()

    return ask, flow


async def transfer(host: Host, peer: str) -> None:
    """Fill the link with payloads, as an exchange does."""
    payload = os.urandom(PIECE)
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            while True:
                await host.rpc.call(peer, SINK, Empty(), payload, timeout_s=600, bulk=True)

        for _ in range(2):
            nursery.start_soon(send)


async def over_ring(messages: int) -> dict[str, Any]:
    """Measure the ring from a trio loop to a process that blocks on it."""
    with tempfile.TemporaryDirectory() as folder:
        there, back = Ring.create(Path(folder), RING_BYTES), Ring.create(Path(folder), RING_BYTES)
        fds = [",".join(map(str, ring.fds)) for ring in (there, back)]
        worker = subprocess.Popen(  # noqa: ASYNC220 - before anything is measured
            [sys.executable, __file__, "--ring", *fds],
            pass_fds=(*there.fds, *back.fds),
            stdout=subprocess.PIPE,
            text=True,
        )
        assert worker.stdout is not None
        stdout = worker.stdout

        async def other() -> float:
            there.put(b"")
            return float(await trio.to_thread.run_sync(stdout.readline))

        async def exchange(payload: bytes) -> None:
            there.put(payload)
            while not back.take():
                await trio.lowlevel.wait_readable(back.fds[1])
            back.done()

        try:
            return {
                f"{size}": {
                    "hot": await timed(exchange, size, messages, 0.0, other),
                    "cold": await timed(exchange, size, messages, COLD_S, other),
                }
                for size in SIZES
            }
        finally:
            worker.kill()
            worker.wait()


# -- runs -----------------------------------------------------------------------------------------------------------

WAYS = ("call", "bulk call", "flow on a stream", "flow", "plain TCP")


def run_pair(way: str, messages: int, lan: Lan | None = None) -> dict[str, Any]:
    """Run both processes of one way, on a shaped network if one is given; return the caller's figures."""
    ips = ("127.0.0.1", "127.0.0.1") if lan is None else (lan.ip(0), lan.ip(1))
    wrapped = (lambda host, *c: list(c)) if lan is None else lan.at_host
    kind = "stream" if way == "flow on a stream" else "bulk"
    server = subprocess.Popen(
        wrapped(1, sys.executable, __file__, "--serve", ips[1], kind),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stdout is not None
        hello = json.loads(server.stdout.readline())
        command = [sys.executable, __file__, "--call", hello["address"], str(hello["plain"]), ips[0], way]
        beside = ["--beside"] if lan is not None else []
        done = subprocess.run(
            wrapped(0, *command, "--messages", str(messages), *beside), capture_output=True, text=True, timeout=600
        )
        if done.returncode:
            raise SystemExit(f"{way} failed: {done.stderr[-2000:]}")
        return json.loads(done.stdout.splitlines()[-1])
    finally:
        server.kill()
        server.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--messages", type=int, default=2000)
    parser.add_argument("--mbit", type=float, default=100.0, help="of the link in the runs beside a transfer")
    parser.add_argument("--serve", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--call", nargs=4, help=argparse.SUPPRESS)
    parser.add_argument("--ring", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--beside", action="store_true", help=argparse.SUPPRESS)
    add_json(parser, "flow")
    options = parser.parse_args()
    if options.serve:
        trio.run(serve, options.serve[0], options.serve[1] == "bulk")
    elif options.ring:
        serve_ring(*options.ring)
    elif options.call:
        address, plain, ip, way = options.call
        print(json.dumps(trio.run(caller, address, int(plain), ip, way, options.messages, options.beside)))
    else:
        measure(options)


def measure(options: argparse.Namespace) -> None:
    figures: dict[str, Any] = {way: run_pair(way, options.messages) for way in WAYS}
    figures["ring"] = trio.run(over_ring, options.messages)
    try:
        with shaped_lan(2, options.mbit) as lan:
            for way in WAYS[:-1]:
                for size, row in run_pair(way, min(options.messages, 500), lan).items():
                    figures[way][size].update(row)
    except Unavailable as error:
        print(f"no run beside a transfer: {error}")
    print(f"{'':18}{'':6}" + "".join(f"{kind:>26}" for kind in ("hot", "cold", "beside a transfer")))
    print(f"{'ms a message':18}{'KB':>6}" + "       CPU      p50     p99" * 3)
    for way, sizes in figures.items():
        for size, row in sizes.items():
            cells = [row.get(kind) for kind in ("hot", "cold", "beside")]
            text = "".join(
                f"{cell['cpu_ms']:10.3f}{cell['p50_ms']:9.3f}{cell['p99_ms']:8.3f}" if cell else " " * 27
                for cell in cells
            )
            print(f"{way:18}{int(size) >> 10:>6}{text}")
    if options.json:
        write_results(options.json, {"messages": options.messages, "mbit": options.mbit, "ways": figures})


if __name__ == "__main__":
    main()
