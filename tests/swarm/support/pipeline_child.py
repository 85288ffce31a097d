"""A replica of stage STAGE of STAGES in a process of its own, for tests that kill, freeze or script it.

    python -m tests.swarm.pipeline_child FOLDER STAGES STAGE ACTIVATIONS

Says {"peer", "stage", "addresses"}, reads the table of all replicas and serves; then answers each line with what it has
counted and when it began to, and ends with its stdin.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import trio

from swarm.pipeline import duplicate_checks
from swarm.pipeline.accounting import SampleAccounting
from swarm.protocol.ledger import Range
from tests.support.newer_trio import run_abandonable
from tests.swarm.support.pipeline_harness import open_replica, rules_of


async def read_line() -> str:
    return await run_abandonable(sys.stdin.readline)


def say(**fields: Any) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201


async def main(folder: Path, stages: int, stage: int, activations: str) -> None:
    torch.set_num_threads(1)
    begun: dict[int, float] = {}

    class Noting(SampleAccounting):
        def begin(self, span: Range, epoch: int) -> bool:
            begun[span[0]] = time.monotonic()
            return super().begin(span, epoch)

    # A missing answer means no; here every peer has time to answer.
    vars(duplicate_checks).update(STILL_WAITING_S=60.0, CHECKS_MAX=100)
    async with open_replica(folder, stages, stage) as replica:
        say(peer=replica.peer, stage=stage, addresses=list(replica.host.addresses))
        table = json.loads(await read_line())
        async with replica.serving(rules_of(stages, activations=activations), table, Noting):
            say(serving=True)
            while await read_line():
                taken = await replica.worker_group.read_gradient()
                say(counted=list(replica.server.accounting.counted), taken=len(taken.micro_batches), begun=begun)


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
