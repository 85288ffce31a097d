"""One peer of hivemind for averaging.py, with its DHT and Go daemon, in a process group of its own.

    python -m benchmarks.rounds.averaging_hivemind NUMBER PARAMS COMPRESSION PEERS FOLDER [BOOTSTRAP]

Prints its address; then, at each line on stdin, fills in its pseudo-gradient, says that it is ready, and at the next
line averages. Timeouts are those that `hivemind.Optimizer` sets.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import hivemind
import torch
from hivemind import compression

from benchmarks.common.tcp_bytes import family, sent_bytes
from benchmarks.rounds.averaging_data import delta_of, save

COMPRESSIONS = {
    "uniform8": compression.Uniform8BitQuantization,
    "blockwise8": compression.BlockwiseQuantization,
    "float16": compression.Float16Compression,
}
MATCHMAKING_S = 1.0  # a full group never waits that long; 15 in hivemind.Optimizer, for groups over the internet
NEXT_CHUNK_S = 15.0
AVERAGING_S = 60.0


def cpu_seconds() -> float:
    return sum(sum(process.cpu_times()[:2]) for process in family())


def main(number: int, numel: int, codec: str, peers: int, folder: Path, bootstrap: list[str]) -> None:
    torch.set_num_threads(1)
    delta = delta_of(number, numel)
    dht = hivemind.DHT(initial_peers=bootstrap, start=True)
    averager = hivemind.averaging.DecentralizedAverager(
        [delta.clone()],
        dht,
        start=True,
        prefix="benchmark",
        target_group_size=peers,
        min_matchmaking_time=MATCHMAKING_S,
        request_timeout=MATCHMAKING_S / 2,
        compression=COMPRESSIONS[codec](),
        next_chunk_timeout=NEXT_CHUNK_S,
        allreduce_timeout=AVERAGING_S,
    )
    print(json.dumps({"addresses": [str(address) for address in dht.get_visible_maddrs()]}), flush=True)
    while sys.stdin.readline():
        with averager.get_tensors() as (tensor,):
            tensor.copy_(delta)
        cpu = cpu_seconds()
        print(json.dumps({"ready": True}), flush=True)
        sys.stdin.readline()
        began = time.monotonic()
        try:
            gathered = averager.step(timeout=AVERAGING_S, allow_retries=False)
            failure = ""
        except Exception as error:  # noqa: BLE001 - whatever hivemind raises is this round's outcome
            gathered, failure = None, f"{type(error).__name__}: {error}"
        ended = time.monotonic()
        cpu = cpu_seconds() - cpu
        with averager.get_tensors() as (tensor,):
            digest = save(tensor, folder / f"hivemind-{number}")
        report = {
            "began": began,
            "ended": ended,
            "group": len(gathered) if gathered else 0,
            "failure": failure,
            "cpu_s": cpu,
            "wire_bytes": sent_bytes(process.pid for process in family()),
            "hash": digest,
        }
        print(json.dumps(report), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], int(sys.argv[4]), Path(sys.argv[5]), sys.argv[6:])
