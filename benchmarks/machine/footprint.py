"""The memory of a peer on a machine without a GPU, by arithmetic (`peer.footprint`) and as measured.

    python benchmarks/machine/footprint.py [--rounds 8] [--only 25M] [--state disk] [--limit 3] [--json [FILE]]

One real run a row: `peer coordinate` and `peer join`, the last of the first peers measured. 25M parameters with two
peers, more with one, since two would take 17 GB. The network process and its worker are looked at every 0.2 s: the
peaks of what is no file's (anonymous and shared memory) of each, and of both with what they share counted once; what
files take of memory beside it, libraries among them, which the kernel takes back when it must; and what the home's
files take. Left out of the sum of the disk is what lies in files without a name, which no folder shows.

A joiner comes after the third round, and after the fifth the measured peer is ended and started again. "beside the
device" is without what the CPU holds in place of a device; with `--state disk` the aim is 3 bytes a parameter and 1 GB.

With `--limit` the measured peer runs in a memory group of so many GB beside the device's own bytes.

Exits with 1 if the peak of memory is more than 15 percent away from the arithmetic, or that of the disk, whose sum is
an upper bound, as much above it; and if the run does not end well. What each process takes of it is judged with
`--state memory` alone: with files there is so little that what a fetch or a restart needs for a moment counts.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.memory_group import memory_group
from benchmarks.common.options import ROOT, add_json, write_results
from benchmarks.common.resident import resident_bytes
from peer.footprint.host import NETWORK_BYTES, WORKER_BYTES
from peer.footprint.workload import Footprint, Workload
from swarm.placement.costs import RunShape
from swarm.run.config import read_run_config

BAR: Final = 0.15
EVERY_S: Final = 0.2
DEADLINE_S: Final = 2400.0
LOOPBACK: Final = ("--listen", "/ip4/127.0.0.1/tcp/0")
MODELS: Final = {  # width, blocks, MLP and peers
    "25M": (512, 8, 1408, 2),
    "100M": (768, 14, 2048, 1),
    "350M": (1024, 27, 2816, 1),
}
STATES: Final = {"25M": ("memory", "disk"), "100M": ("memory", "disk"), "350M": ("disk",)}
JOINS_AFTER: Final = 3
RESTARTS_AFTER: Final = 5
AIM: Final = (3.0, 1e9)
"""Bytes a parameter, and bytes, of a peer with `--state disk`."""
UNSEEN: Final = (
    "states kept for joiners",
    "exchanges kept",
    "merged results kept",
    "inner optimizer, saved",
    "shared with the worker: outer weights, product",
)
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

    def __init__(self, home: Path) -> None:
        self._home = home
        self.network = self.worker = self.both = self.disk = self.of_files = 0

    def look(self, pid: int) -> None:
        self.disk = max(self.disk, sum(dict(map(_file, self._home.rglob("*"))).values()))
        with suppress(psutil.Error, OSError):
            network = psutil.Process(pid)
            workers = network.children(recursive=True)
            kinds = [resident_bytes(process.pid) for process in (network, *workers)]
            own, shared, files = ([kind.get(name, 0) for kind in kinds] for name in ("RssAnon", "RssShmem", "RssFile"))
            self.network = max(self.network, own[0] + shared[0])
            self.worker = max(self.worker, *map(sum, zip(own[1:], shared[1:], strict=True)), 0)
            self.both = max(self.both, sum(own) + max(shared))
            self.of_files = max(self.of_files, *files)


def _file(path: Path) -> tuple[int, int]:
    """Return a file's number on its disk, and its bytes; none of a folder, or of a file that has just gone."""
    with suppress(OSError):
        if path.is_file():
            return path.stat().st_ino, path.stat().st_size
    return 0, 0


def start(
    stack: ExitStack, folder: Path, *arguments: str, first: Callable[[], None] | None = None
) -> subprocess.Popen[bytes]:
    """Start `peer` with its output in a file; it is stopped when the stack is left. `first`: what the new process does
    before."""
    log = stack.enter_context((folder / f"{arguments[0]}-{time.monotonic_ns()}.log").open("wb"))
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cli.main", *arguments]
    child = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=first)

    def stop() -> None:
        child.terminate()
        child.wait(60)

    stack.callback(stop)
    return child


def measure(name: str, state: str, rounds: int, limit: float | None = None) -> Row:
    """Run a swarm, and measure one peer of it, which has at most `limit` bytes beside the device's own."""
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

        enter = None
        if limit is not None:
            device = footprint_of(file, state, peers + 1).device_bytes
            enter = stack.enter_context(memory_group(int(device + limit)))

        def join(number: int) -> subprocess.Popen[bytes]:
            options = ("--threads", "1", "--device", "cpu", "--state", state, *LOOPBACK)
            command = ("join", str(invite), "--home", str(folder / str(number)), *options)
            return start(stack, folder, *command, first=enter if number == peers - 1 else None)

        for number in range(peers):
            measured = join(number)
        home = folder / str(peers - 1)
        peaks, has_joiner, has_restarted = Peaks(home), False, False
        while measured.poll() is None and time.monotonic() - begin < DEADLINE_S:
            peaks.look(measured.pid)
            time.sleep(EVERY_S)
            done = _rounds(home / "events.jsonl")
            if not has_joiner and done >= JOINS_AFTER:
                has_joiner = bool(join(peers))
            if not has_restarted and done >= RESTARTS_AFTER:
                has_restarted = True
                measured.terminate()
                measured.wait(60)
                measured = join(peers - 1)
        if measured.returncode != 0:
            said = "\n".join(log.read_text()[-2000:] for log in sorted(folder.glob("join-*.log")))
            raise SystemExit(f"the run of {name} did not end well: {measured.returncode}\n{said}")
        if not has_restarted:
            raise SystemExit(f"the run of {name} ended before the restart: give it more rounds")
        return row(name, state, file, peers + 1, peaks) | ({} if limit is None else {"limit": limit})


def _rounds(log: Path) -> int:
    with suppress(OSError):
        return log.read_text().count('"round_committed"')
    return 0


def workload_of(file: Path, state: str, peers: int) -> tuple[RunShape, Workload]:
    run = read_run_config(file)
    assert run.model is not None
    shape = RunShape(run.model, run.data, run.inner, run.outer, run.codec, run.pipeline, ((0, run.model.layers),))
    return shape, replace(shape.workload(0, peers), state_on_disk=state == "disk")


def footprint_of(file: Path, state: str, peers: int) -> Footprint:
    shape, work = workload_of(file, state, peers)
    return shape.footprint(work)


def row(name: str, state: str, file: Path, peers: int, peaks: Peaks) -> Row:
    """Return what was measured beside what was foretold."""
    _, work = workload_of(file, state, peers)
    sizes = footprint_of(file, state, peers)
    disk = sizes.disk_bytes - sum(sizes.disk.get(item, 0.0) for item in UNSEEN)
    shared = sizes.host.get("shared with the worker: outer weights, product", 0.0)
    foretold = {
        "network": sum(sizes.host.values()) - WORKER_BYTES,
        "worker": WORKER_BYTES + sizes.device_bytes + shared,
        "memory": sizes.host_bytes,
        "disk": disk,
    }
    measured = {"network": peaks.network, "worker": peaks.worker, "memory": peaks.both, "disk": peaks.disk}
    return {
        "model": name,
        "state": state,
        "parameters": work.parameters,
        "peers": peers,
        "foretold": foretold,
        "measured": measured,
        "of_files": peaks.of_files,
        "beside_the_device": peaks.both - sizes.device_bytes,
        "aim": AIM[0] * work.parameters + AIM[1] if state == "disk" else None,
    }


def within(found: Row) -> bool:
    """Whether all peaks are close to the arithmetic, and that of the disk no larger."""
    judged = ("memory", "disk") if found["state"] == "disk" else found["measured"]
    ratios = {what: found["measured"][what] / found["foretold"][what] for what in judged}
    return all(ratio <= 1 + BAR and (what == "disk" or ratio >= 1 - BAR) for what, ratio in ratios.items())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30, help="of each run; two checkpoints come with fewer than that")
    parser.add_argument("--only", choices=MODELS, help="measure this model alone")
    parser.add_argument("--state", choices=("memory", "disk"), help="measure these rows alone")
    parser.add_argument("--limit", type=float, help="GB that the measured peer has beside the device's own bytes")
    add_json(parser, "machine/footprint")
    options = parser.parse_args()
    rows = []
    print(f"counted for the programs alone: network {NETWORK_BYTES / 1e6:.0f} MB, worker {WORKER_BYTES / 1e6:.0f} MB")
    print(f"{'model':7}{'state':8}{'of':10}{'foretold MB':>12}{'measured MB':>12}{'ratio':>7}{'bytes a parameter':>19}")
    names = [options.only] if options.only else [name for name in MODELS if name != "350M"]
    for name, state in ((one, state) for one in names for state in STATES[one]):
        if options.state not in (None, state):
            continue
        found = measure(name, state, options.rounds, options.limit and options.limit * 1e9)
        rows.append(found)
        for what, size in found["measured"].items():
            foretold = found["foretold"][what]
            ratio, each = size / foretold, size / found["parameters"]
            figures = f"{foretold / 1e6:12.0f}{size / 1e6:12.0f}{ratio:7.2f}{each:19.1f}"
            print(f"{name:7}{state:8}{what:10}{figures}", flush=True)
        aim = f", aim {found['aim'] / 1e6:.0f}" if found["aim"] else ""
        beside, of_files = found["beside_the_device"] / 1e6, found["of_files"] / 1e6
        print(f"{name:7}{state:8}beside the device {beside:.0f} MB{aim}; of files {of_files:.0f}", flush=True)
    passed = all(map(within, rows))
    verdict = f"every peak of memory is within {BAR:.0%} of the arithmetic, that of the disk below"
    print(f"{'PASS' if passed else 'FAIL'}  {verdict}")
    if options.json:
        write_results(options.json, {"rows": rows, "passed": passed})
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
