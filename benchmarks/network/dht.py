"""Measures the DHT beside hivemind's: latency, records that survive a crash of 30 %, and the cost of an idle node.

    python benchmarks/network/dht.py --nodes 20 --records 60 [--rival hivemind] [--json [FILE]]

Each side runs as two fleets of nodes in two processes. One of them, with 30 % of the nodes, is killed or frozen. The
rival's processes import hivemind, which cannot share a process with libp2p. Everything runs on 127.0.0.1, so latencies
are those of the software with its CPU time: for ours of all nodes of a fleet in one Python process, for hivemind of
Python and one Go daemon a node. Every key is new to the node that asks for it. The `again` rows repeat the key, as
peers do that refresh and poll the same few keys. hivemind's records are unsigned, and its repeated reads may come from
its cache.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results

FLEETS = {"barnraise": "benchmarks.network.dht_fleet", "hivemind": "benchmarks.network.dht_fleet_hivemind"}
DEAD_SHARE = 0.3
IDLE_S = 10.0


class Fleet:
    """Nodes in one child process, driven by JSON lines."""

    def __init__(self, side: str, nodes: int, bootstrap: list[str]) -> None:
        self._command = f"python -m {FLEETS[side]} {nodes} {' '.join(bootstrap)}"
        self._process = subprocess.Popen(
            [
                sys.executable,
                "-m",
                FLEETS[side],
                str(nodes),
                *bootstrap,
            ],  # -m: run as a script, `dht` would be this file
            cwd=Path(__file__).parents[2],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # its own process group, so that hivemind's daemons die and freeze with it
        )
        self.hello = self._read()

    def ask(self, **request: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self._read()

    def signal(self, number: signal.Signals) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)

    def end(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"a fleet ended early: run `{self._command}` to see why")
        answer: dict[str, Any] = json.loads(line)
        return answer


@contextlib.contextmanager
def two_fleets(side: str, nodes: int) -> Iterator[tuple[Fleet, Fleet]]:
    """Start 70 % of the nodes, and the 30 % that will be killed or frozen."""
    doomed = max(1, round(nodes * DEAD_SHARE))
    with contextlib.ExitStack() as stack:
        first = Fleet(side, nodes - doomed, [])
        stack.callback(first.end)
        second = Fleet(side, doomed, first.hello["addresses"][:1])
        stack.callback(second.end)
        yield first, second


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def summary(prefix: str, answer: dict[str, Any]) -> dict[str, float]:
    return {
        f"{prefix}_p50_ms": round(percentile(answer["ms"], 0.5), 1),
        f"{prefix}_p99_ms": round(percentile(answer["ms"], 0.99), 1),
        f"{prefix}_ok": round(sum(answer["ok"]) / len(answer["ok"]), 3),
    }


def measure(side: str, nodes: int, records: int) -> dict[str, float]:
    """Return all figures of one side."""
    figures: dict[str, float] = {}
    for fault in (signal.SIGKILL, signal.SIGSTOP):
        with two_fleets(side, nodes) as (survivors, doomed):
            keys = [f"{fault.name}-{number}" for number in range(records)]
            if fault is signal.SIGKILL:
                figures["join_ms"] = round(percentile(survivors.hello["join_ms"] + doomed.hello["join_ms"], 0.5), 1)
                figures |= summary("put", survivors.ask(do="put", keys=keys))
                figures |= summary("put_again", survivors.ask(do="put", keys=keys))
                figures |= summary("get", survivors.ask(do="get", keys=keys))
                figures |= summary("get_again", survivors.ask(do="get", keys=keys))
                cpu = [fleet.ask(do="cpu", seconds=IDLE_S)["cpu_s"] for fleet in (survivors, doomed)]
                figures["idle_cpu_percent_a_node"] = round(100 * sum(cpu) / IDLE_S / nodes, 3)
                figures["rss_mb_a_node"] = round(survivors.ask(do="memory")["rss_mb"] / survivors.hello["nodes"], 1)
            survivors.ask(do="put", keys=keys)
            doomed.signal(fault)
            name = "killed" if fault is signal.SIGKILL else "frozen"
            figures |= summary(f"get_{name}", survivors.ask(do="get", keys=keys))
            figures |= summary(f"put_{name}", survivors.ask(do="put", keys=keys))
            figures |= summary(f"get_{name}_later", survivors.ask(do="get", keys=keys))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, default=20)
    parser.add_argument("--records", type=int, default=60)
    parser.add_argument("--rival", choices=["hivemind", "none"], default="hivemind")
    add_json(parser, "dht")
    options = parser.parse_args()
    sides = ["barnraise"] + (["hivemind"] if options.rival == "hivemind" else [])
    results = {side: measure(side, options.nodes, options.records) for side in sides}
    print(f"{options.nodes} nodes, {options.records} records, {DEAD_SHARE:.0%} killed or frozen")
    print(f"{'':30}" + "".join(f"{side:>14}" for side in sides))
    for name in results["barnraise"]:
        print(f"{name:30}" + "".join(f"{results[side][name]:>14}" for side in sides))
    if options.json:
        write_results(options.json, {"nodes": options.nodes, "records": options.records, **results})


if __name__ == "__main__":
    main()
