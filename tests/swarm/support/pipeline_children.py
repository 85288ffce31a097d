"""Replicas of one stage in processes of their own, for tests that kill, freeze or script them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from swarm.pipeline.accounting import micro_batches_of
from tests.support.forking.forked import ForkedProcess
from tests.support.newer_trio import run_abandonable
from tests.swarm.support.pipeline_harness import MICRO

ROOT = Path(__file__).parents[3]
Span = tuple[int, int]


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
        line = await run_abandonable(self.process.stdout.readline)
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def counted(self) -> dict[Span, float]:
        """Return the micro-batches that it has counted, and when it decided to, by the clock of `thaw`."""
        answer = await self.ask()
        spans = micro_batches_of([(first, last) for first, last in answer["counted"]], MICRO)
        assert len(spans) == answer["taken"], "what the server says is what the worker has"
        return {span: answer["begun"][str(span[0])] for span in spans}

    async def stopped(self) -> None:
        """Wait until its script has frozen it."""
        options = os.WSTOPPED | os.WNOWAIT
        await run_abandonable(os.waitid, os.P_PID, self.process.pid, options)

    def thaw(self) -> float:
        """Continue the process; return when."""
        at = time.monotonic()
        self.process.send_signal(signal.SIGCONT)
        return at


@asynccontextmanager
async def open_children(folder: Path, stages: int, stage: int, faults: list[str]) -> AsyncIterator[list[Child]]:
    """Open one replica of `stage` for each of the scripts."""
    children: list[Child] = []
    try:
        for k, fault in enumerate(faults):
            arguments = [str(folder / f"child-{k}"), str(stages), str(stage), "none"]
            process = ForkedProcess(
                "tests.swarm.support.pipeline_child",
                *arguments,
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
