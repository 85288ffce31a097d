"""The memory of a peer on a machine without a GPU, by arithmetic (`peer.footprint`) and as measured.

    python benchmarks/machine/footprint.py [--rounds 8] [--only 25M] [--json [FILE]]

One real run a row: `peer coordinate` and `peer join`, the last peer measured. 25M parameters with two peers, 100M with
one, since two would take 17 GB. The network process and its worker are looked at every 0.2 s: their peak RSS, in which
both count the vectors that they share, the peak of the sum of their PSS, in which each page counts once, and the peak
of what the home's files take. Left out of the sum of its disk are a state being fetched, since a founder fetches none,
and what lies in files without a name, which no folder shows.

Exits with 1 if a peak is more than 15 percent away from the arithmetic.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import ROOT, add_json, write_results
from peer.footprint.host import NETWORK_BYTES, WORKER_BYTES
from swarm.placement.costs import RunShape
from swarm.run.config import read_run_config

BAR: Final = 0.15
EVERY_S: Final = 0.2
DEADLINE_S: Final = 900.0
LOOPBACK: Final = ("--listen", "/ip4/127.0.0.1/tcp/0")
MODELS: Final = {"25M": (512, 8, 1408, 2), "100M": (768, 14, 2048, 1)}
"""Width, blocks, MLP and peers."""
UNSEEN: Final = ("state being fetched", "snapshots for joiners", "exchanges kept", "merged results kept")
RUN: Final = """
[run]
name = "footprint"
open = true
min_peers = {peers}
rounds = {rounds}
[model]
hidden_size = {width}
layers = {layers}
heads = 8
kv_heads = 8
intermediate_size = {inter}
max_seq_len = 128
vocab_size = 256
[data]
seq_len = 128
max_bytes = 1000000
[inner]
lr = 1e-3
batch_size = 4
total_steps = 100
dtype = "fp32"
[outer]
method = "diloco"
steps = 1
"""
Row = dict[str, Any]


class Peaks:
    """The largest figures seen of a peer's network process, its worker and its home."""

    def __init__(self, pid: int, home: Path) -> None:
        self._network, self._home = psutil.Process(pid), home
        self.network = self.worker = self.both = self.disk = 0

    def look(self) -> None:
        self.disk = max(self.disk, sum(map(_size, self._home.rglob("*"))))
        with suppress(psutil.Error):
            workers = self._network.children(recursive=True)
            rss = [worker.memory_info().rss for worker in workers]
            self.network = max(self.network, self._network.memory_info().rss)
            self.worker = max(self.worker, *rss, 0)
            self.both = max(self.both, sum(process.memory_full_info().pss for process in (self._network, *workers)))


def _size(path: Path) -> int:
    """Return the bytes of a file; none of a folder, or of a file that has just gone."""
    with suppress(OSError):
        return path.stat().st_size if path.is_file() else 0
    return 0


def start(stack: ExitStack, folder: Path, *arguments: str) -> subprocess.Popen[bytes]:
    """Start `peer` with its output in a file; it is stopped when the stack is left."""
    log = stack.enter_context((folder / f"{arguments[0]}-{time.monotonic_ns()}.log").open("wb"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    child = subprocess.Popen(
        [sys.executable, "-m", "cli.main", *arguments], stdout=log, stderr=subprocess.STDOUT, env=environment
    )

    def stop() -> None:
        child.terminate()
        child.wait(60)

    stack.callback(stop)
    return child


def measure(name: str, rounds: int) -> Row:
    width, layers, inter, peers = MODELS[name]
    with tempfile.TemporaryDirectory() as temporary, ExitStack() as stack:
        folder = Path(temporary)
        file = folder / "run.toml"
        file.write_text(RUN.format(peers=peers, rounds=rounds, width=width, layers=layers, inter=inter))
        start(stack, folder, "coordinate", str(file), "--home", str(folder / "c"), *LOOPBACK)
        invite = folder / "c" / "invite"
        begin = time.monotonic()
        while not invite.exists():
            if time.monotonic() - begin > DEADLINE_S:
                raise SystemExit("the coordinator prints no invite")
            time.sleep(EVERY_S)
        for number in range(peers):
            home = folder / str(number)
            joined = ("join", str(invite), "--home", str(home), "--threads", "1", "--device", "cpu", *LOOPBACK)
            last = start(stack, folder, *joined)
        peaks = Peaks(last.pid, home)
        while last.poll() is None and time.monotonic() - begin < DEADLINE_S:
            peaks.look()
            time.sleep(EVERY_S)
        if last.returncode != 0:
            raise SystemExit(f"the run of {name} did not end well: {last.returncode}")
        return row(name, file, peers, peaks)


def row(name: str, file: Path, peers: int, peaks: Peaks) -> Row:
    """Return what was measured beside what was foretold."""
    run = read_run_config(file)
    assert run.model is not None
    shape = RunShape(run.model, run.data, run.inner, run.outer, run.codec, run.pipeline, ((0, run.model.layers),))
    work = shape.workload(0, peers)
    sizes = shape.footprint(work)
    shared = sizes.host["shared with the worker: outer weights, product"]
    network = sum(sizes.host.values()) - WORKER_BYTES
    foretold = {
        "network": network,
        "worker": WORKER_BYTES + sizes.device_bytes + shared,
        "memory": sizes.host_bytes,
        "disk": sizes.disk_bytes - sum(sizes.disk.get(item, 0.0) for item in UNSEEN),
    }
    measured = {"network": peaks.network, "worker": peaks.worker, "memory": peaks.both, "disk": peaks.disk}
    return {"model": name, "parameters": work.parameters, "peers": peers, "foretold": foretold, "measured": measured}


def within(found: Row) -> bool:
    """Whether all peaks are close to the arithmetic."""
    return all(abs(size / found["foretold"][what] - 1) <= BAR for what, size in found["measured"].items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="of each run; two checkpoints come with fewer than that")
    parser.add_argument("--only", choices=MODELS, help="measure this model alone")
    add_json(parser, "machine/footprint")
    options = parser.parse_args()
    rows = []
    print(f"counted for the programs alone: network {NETWORK_BYTES / 1e6:.0f} MB, worker {WORKER_BYTES / 1e6:.0f} MB")
    print(f"{'model':7}{'of':9}{'foretold MB':>12}{'measured MB':>12}{'ratio':>7}{'bytes a parameter':>19}")
    for name in [options.only] if options.only else MODELS:
        found = measure(name, options.rounds)
        rows.append(found)
        for what, size in found["measured"].items():
            foretold = found["foretold"][what]
            a_parameter = size / found["parameters"]
            print(f"{name:7}{what:9}{foretold / 1e6:12.0f}{size / 1e6:12.0f}{size / foretold:7.2f}{a_parameter:19.1f}")
    passed = all(map(within, rows))
    print(f"{'PASS' if passed else 'FAIL'}  every peak is within {BAR:.0%} of the arithmetic")
    if options.json:
        write_results(options.json, {"rows": rows, "passed": passed})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
