"""State transfer: MB/s that a joiner gets from 1 to 4 donors, each in its own process, and the machine's limits.

    python benchmarks/rounds/state_transfer.py [--mb 256] [--donors 4] [--repeat 3] [--json [FILE]]

Everything runs on 127.0.0.1, so the numbers are the cost of processors (encryption, framing, hashing, disk), not of a
network. Limits measured in the same run: a memory copy, blake3, the disk's page cache, one plain TCP connection.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
import trio

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from peer.checkpoint.generation import StateGeneration
from peer.checkpoint.hash_tree import hash_state
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from swarm.state.fetch import fetch_state
from swarm.state.partial_file import PartFile
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore

MB = 1_000_000


def make_state(numel: int) -> list[torch.Tensor]:
    """Return theta and momentum, the same in every process."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(numel, generator=generator) for _ in range(2)]


# -- donors ---------------------------------------------------------------------------------------------------------


async def serve(numel: int) -> None:
    """Run a donor process: print its addresses and serve until its standard input ends."""
    state = make_state(numel)
    tree = hash_state(state)
    snapshots = SnapshotStore(tree.size_bytes, 1 << 20)
    snapshots.publish(StateGeneration(dict(zip(("theta", "momentum"), state, strict=True)), tree))
    async with open_host(identity=Identity.generate(), events=EventLog()) as host:
        serve_snapshots(host.rpc, [snapshots])
        print(json.dumps({"peer": host.peer_id, "addresses": host.addresses}), flush=True)
        await trio.to_thread.run_sync(sys.stdin.read, abandon_on_cancel=True)


@contextmanager
def donor(numel: int) -> Iterator[dict[str, object]]:
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(numel)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdin is not None and process.stdout is not None
        hello: dict[str, object] = json.loads(process.stdout.readline())
        yield {**hello, "pid": process.pid}
    finally:
        process.kill()
        process.wait()


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- the fetch --------------------------------------------------------------------------------------------------------


async def fetch_once(donors: list[dict[str, object]], root: bytes, size_bytes: int, folder: Path) -> dict[str, float]:
    async with open_host(identity=Identity.generate(), events=EventLog()) as host:
        names = []
        for hello in donors:
            host.book.add(str(hello["peer"]), list(hello["addresses"]))  # type: ignore[call-overload]
            names.append(str(hello["peer"]))
            await host.connect(names[-1], timeout_s=30)
        mine = time.process_time()
        theirs = [cpu_seconds(int(str(hello["pid"]))) for hello in donors]
        fetched = await fetch_state(host.rpc, lambda: names, root, size_bytes, folder / "state.part", host.events)
        spent = [cpu_seconds(int(str(h["pid"]))) - before for h, before in zip(donors, theirs, strict=True)]
        return {
            "seconds": fetched.seconds,
            "mb_per_s": size_bytes / fetched.seconds / MB,
            "donors_used": float(len(fetched.donors)),
            "joiner_cpu_s": time.process_time() - mine,
            "donor_cpu_s": sum(spent),
        }


# -- limits -----------------------------------------------------------------------------------------------------------


def best_rate(size_bytes: int, work: object, times: int = 3) -> float:
    assert callable(work)
    seconds = []
    for _ in range(times):
        started = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - started)
    return size_bytes / min(seconds) / MB


def plain_tcp(state: list[torch.Tensor]) -> None:
    """Send the state over one unencrypted connection, 1 MiB a write, into memory."""
    views = [memoryview(tensor.numpy()).cast("B") for tensor in state]
    with socket.create_server(("127.0.0.1", 0)) as server:

        def send() -> None:
            with socket.create_connection(server.getsockname()) as out:
                for view in views:
                    for start in range(0, len(view), 1 << 20):
                        out.sendall(view[start : start + (1 << 20)])

        sender = threading.Thread(target=send)
        sender.start()
        receiver, _ = server.accept()
        target = bytearray(sum(map(len, views)))
        with receiver, memoryview(target) as view:
            got = 0
            while got < len(target):
                got += receiver.recv_into(view[got : got + (1 << 20)])
        sender.join()


def limits(state: list[torch.Tensor], folder: Path) -> dict[str, float]:
    tree = hash_state(state)
    copies = [tensor.clone() for tensor in state]
    joined = b"".join(tensor.numpy().tobytes() for tensor in state)

    def write() -> None:
        part = PartFile(folder / "limit.part", tree.size_bytes)
        for index in range(len(tree.hashes)):
            start, end = tree.span(index)
            part.store(tree, index, memoryview(joined)[start:end])
        part.discard()

    return {
        "memory_copy_mb_per_s": best_rate(
            tree.size_bytes, lambda: [c.copy_(s) for c, s in zip(copies, state, strict=True)]
        ),
        "hash_mb_per_s": best_rate(tree.size_bytes, lambda: hash_state(state)),
        "verify_and_write_mb_per_s": best_rate(tree.size_bytes, write),
        "plain_tcp_mb_per_s": best_rate(tree.size_bytes, lambda: plain_tcp(state)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("--mb", type=int, default=256, help="size of the state")
    parser.add_argument("--donors", type=int, default=4, help="up to this many")
    parser.add_argument("--repeat", type=int, default=3, help="fetches per line; the median is shown")
    add_json(parser, "state_transfer")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        trio.run(serve, options.serve)
        return
    numel = options.mb * MB // 8
    state = make_state(numel)
    tree = hash_state(state)
    report: dict[str, object] = {"size_mb": tree.size_bytes / MB, "cores": os.cpu_count()}
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        report["limits"] = bounds = limits(state, folder)
        print(f"state {tree.size_bytes / MB:.0f} MB in {len(tree.hashes)} chunks, {os.cpu_count()} cores\n")
        for what, rate in bounds.items():
            print(f"  {what.removesuffix('_mb_per_s').replace('_', ' '):<18} {rate:8.0f} MB/s")
        print("\n  donors   MB/s   seconds   of plain TCP   CPU s joiner   CPU s donors")
        lines = []
        donors: list[dict[str, object]] = []
        for count in range(1, options.donors + 1):
            donors.append(stack.enter_context(donor(numel)))
            runs = [trio.run(fetch_once, donors, tree.root, tree.size_bytes, folder) for _ in range(options.repeat)]
            line = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            share = line["mb_per_s"] / bounds["plain_tcp_mb_per_s"]
            lines.append({"donors": count, **line, "of_plain_tcp": share})
            print(
                f"  {count:>6} {line['mb_per_s']:>6.0f} {line['seconds']:>9.2f} {share:>13.0%}"
                f" {line['joiner_cpu_s']:>14.2f} {line['donor_cpu_s']:>14.2f}"
            )
        report["fetch"] = lines
    if options.json:
        write_results(options.json, report)


if __name__ == "__main__":
    main()
