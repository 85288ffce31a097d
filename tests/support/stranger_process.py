"""Starts strangers to a swarm of processes, and judges what they report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import trio

from tests.support.protocol_methods import REPOSITORY, all_methods

MODES: Final = ("garbage", "zero", "plausible", "refusing")
REFUSALS: Final = {"NotAdmitted", "UnknownMethod", "Busy", "DialError", "ConnectionLost", "DeadlineExceeded", "TooMany"}
"""What a member may answer to a stranger's call of a method that is not open; and no answer at all."""
CALLS_BYTES_MAX: Final = 4000  # a call of an open method: names, nonces, a credential


class StrangerProcess:
    """The strangers of one process. `addresses`: by mode."""

    def __init__(self, process: trio.Process, folder: Path, addresses: dict[str, str]) -> None:
        self._process, self.folder, self.addresses = process, folder, addresses
        self._unread = b""

    async def meet(self, address: str) -> None:
        """Let them dial the member there and begin to call."""
        await self._ask(address)

    async def reports(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = await self._ask("report")
        return answer

    async def _ask(self, line: str) -> Any:
        assert self._process.stdin is not None
        await self._process.stdin.send_all(line.encode() + b"\n")
        return await self.answer()

    async def answer(self) -> Any:
        assert self._process.stdout is not None
        while b"\n" not in self._unread:
            chunk = await self._process.stdout.receive_some()
            assert chunk, f"the strangers have ended with {self._process.poll()}"
            self._unread += chunk
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    async def check(self, secrets: Iterable[bytes], texts: Iterable[bytes]) -> None:
        """Assert that no gated call, payload, secret or text has reached them, and that members refused theirs."""
        reports = await self.reports()
        access = {method.name: method.access for method in all_methods()}
        heard = (self.folder / "input.bin").read_bytes()
        calls = (self.folder / "calls.bin").read_bytes()
        for report in reports:
            gated = {name: times for name, times in report["asked"].items() if access[name] != "open"}
            assert not gated, f"gated calls reached the stranger that answers {report['mode']}: {gated}"
            assert report["payload_bytes"] == 0, report
            assert not report["asked"].get("run.prove"), "a member proved itself to a peer that had proved nothing"
            answered = {name for name in report["answers"] if name.rpartition(": ")[2] not in REFUSALS}
            assert not answered, f"members answered a stranger: {answered}"
        assert any(report["asked"].get("run.enter") for report in reports), "no member has tried to enter with them"
        assert sum(sum(report["answers"].values()) for report in reports) > 100, "members were called"
        for name in (name for name, needed in access.items() if needed != "open"):
            assert name.encode() not in calls, f"the beginning of a call of {name} reached a stranger"
        times = sum(sum(report["asked"].values()) for report in reports)
        assert len(calls) < CALLS_BYTES_MAX * times, f"{len(calls)} bytes reached strangers in {times} calls"
        for secret in secrets:
            assert len(secret) >= 16 and secret not in heard, "a secret reached a stranger"
        for text in texts:
            assert text not in heard, "training text reached a stranger"
            tokens = b"".join(byte.to_bytes(4, "little") for byte in text)
            assert tokens not in heard, "token ids reached a stranger"


@asynccontextmanager
async def open_strangers(folder: Path, run_id: str, modes: Iterable[str] = MODES) -> AsyncIterator[StrangerProcess]:
    """Run strangers until the block ends."""
    folder.mkdir()
    command = [sys.executable, "-m", "tests.support.stranger", str(folder), run_id, *modes]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with (folder / "log").open("wb") as log:
        process = await trio.lowlevel.open_process(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, cwd=REPOSITORY
        )
    try:
        strangers = StrangerProcess(process, folder, {})
        strangers.addresses = await strangers.answer()
        yield strangers
    finally:
        process.kill()
        with trio.CancelScope(shield=True):
            await process.wait()
