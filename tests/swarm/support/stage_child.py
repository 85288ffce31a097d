"""One replica of a stage with its driver in a process of its own, for a test that kills it.

    stage_child.py FOLDER STAGES STAGE BATCH ROUNDS

Says its entry of the table, reads the table, says that it is ready, and takes part in a synchronous run's rounds.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
import trio

from optim.config import AllReduceConfig
from peer.identity import Identity
from tests.support.newer_trio import run_abandonable
from tests.swarm.support.pipeline_harness import open_replica
from tests.swarm.support.stage_replicas import Setting, entry_of, open_member


async def main(folder: Path, stages: int, stage: int, batch: int, rounds: int) -> None:
    torch.set_num_threads(1)
    setting = Setting(stages, AllReduceConfig(batch=batch), rounds)
    authority = Identity.load_or_create(folder / "authority.key")
    async with open_replica(folder / "child", stages, stage, **setting.spec) as replica:
        print(json.dumps({replica.peer: entry_of(replica)}), flush=True)  # noqa: T201
        table = json.loads(await run_abandonable(sys.stdin.readline))
        async with open_member(replica, setting, table, authority, folder / "child") as member:
            print(json.dumps({"ready": True}), flush=True)  # noqa: T201
            await member.run()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]))
