"""Replicas that die, freeze, send garbage or lose an answer in the middle of micro-batches: a retry each, and every
micro-batch counted once in every stage."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import trio

from swarm.ledger import count
from swarm.pipeline.counting import spans_of
from tests.swarm.pipeline_harness import MICRO, Table, issue_all, open_replicas, rules_of

pytestmark = [
    pytest.mark.soak,  # half a minute; each of its faults is in tests/soak/test_pipeline_faults.py, too
    pytest.mark.process,
    pytest.mark.skipif(sys.platform != "linux", reason="stages run in worker processes, supervised through /proc"),
]
ROOT = Path(__file__).parents[2]


@dataclass
class Child:
    process: subprocess.Popen[str]
    hello: dict[str, Any] = field(default_factory=dict)

    @property
    def peer(self) -> str:
        return str(self.hello["peer"])

    async def ask(self, line: str = "") -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return await self.answer()

    async def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await trio.to_thread.run_sync(self.process.stdout.readline, abandon_on_cancel=True)
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def counted(self) -> list[tuple[int, int]]:
        answer = await self.ask()
        spans = spans_of([(first, last) for first, last in answer["counted"]], MICRO)
        assert len(spans) == answer["taken"], "what the station says is what the worker has"
        return spans


@asynccontextmanager
async def open_children(folder: Path, stages: int, stage: int, faults: list[str]) -> AsyncIterator[list[Child]]:
    """One replica of `stage` for each of the scripts."""
    children: list[Child] = []
    tied = ["setpriv", "--pdeathsig", "KILL"] if shutil.which("setpriv") else []
    try:
        for k, fault in enumerate(faults):
            arguments = [str(folder / f"child-{k}"), str(stages), str(stage), "none"]
            process = subprocess.Popen(  # from this thread: --pdeathsig is about the thread that starts it
                [*tied, sys.executable, "-m", "tests.swarm.pipeline_child", *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=ROOT,
                env={**os.environ, "BARNRAISE_FAULT": fault, "OMP_NUM_THREADS": "1"},
            )
            children.append(Child(process))
        for child in children:
            child.hello = await child.answer()
        yield children
    finally:
        for child in children:
            child.process.kill()
            child.process.wait()
            for pipe in (child.process.stdin, child.process.stdout):
                assert pipe is not None
                pipe.close()


async def test_faults_in_the_middle_cost_a_retry_each(tmp_path: Path) -> None:
    """Of three replicas of stage 1 one is killed with a gradient in its hands, one frozen before a forward, and one
    counts a micro-batch and loses the answer."""
    faults = ["kill:pipeline_backward:3", "stop:pipeline_forward:4", "drop:pipeline_answer:5"]
    rules = rules_of(3)
    spans = [(MICRO * k, MICRO * (k + 1)) for k in range(60)]
    async with (
        open_replicas(tmp_path, [1, 0, 1]) as stages,
        open_children(tmp_path, 3, 1, faults) as children,
    ):
        first, last = stages[0][0], stages[2][0]
        table: Table = {child.peer: child.hello for child in children}
        async with first.serving(rules, table), last.serving(rules, table):
            for child in children:
                assert await child.ask(json.dumps(table)) == {"serving": True}
            killed, frozen, dropper = children
            await issue_all(first, spans)
            assert killed.process.wait(60) == -signal.SIGKILL
            frozen.process.send_signal(signal.SIGCONT)
            counted, thawed = set(await dropper.counted()), set(await frozen.counted())
            assert len(spans) - 2 <= len(counted | thawed) <= len(spans), "the killed one fell with its third"
            # What it had in hand as it froze was retried without its word. Both have counted that if its worker was
            # done; then their contributions overlap, and the leader of the round takes one of them.
            assert len(counted & thawed) <= 3
            assert count(first.station.counting.counted) == count(last.station.counting.counted) == MICRO * len(spans)
            for replica in (first, last):
                assert len((await replica.gang.take_gradient()).micro_batches) == len(spans)
                assert not replica.struck()
