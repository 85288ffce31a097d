"""Starts strangers to a swarm of processes, and judges what they report."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

from tests.support.forking.children import Child, open_child
from tests.support.protocol_methods import all_methods

MODES: Final = ("garbage", "zero", "plausible", "refusing")
REFUSALS: Final = {"NotAdmitted", "UnknownMethod", "Busy", "DialError", "ConnectionLost", "DeadlineExceeded", "TooMany"}
"""What a member may answer to a stranger's call of a method that is not open; and no answer at all."""
CALLS_BYTES_MAX: Final = 4000  # a call of an open method: names, nonces, a credential


class StrangerProcess:
    """The strangers of one process. `addresses`: by mode."""

    def __init__(self, child: Child, folder: Path, addresses: dict[str, str]) -> None:
        self._child, self.folder, self.addresses = child, folder, addresses

    async def meet(self, address: str) -> None:
        """Let them dial the member there and begin to call."""
        await self._child.ask(address)

    async def reports(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = await self._child.ask("report")
        return answer

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
    command, environment = (
        ("tests.support.stranger", str(folder), run_id, *modes),
        {**os.environ, "OMP_NUM_THREADS": "1"},
    )
    with (folder / "log").open("wb") as log:
        async with open_child(*command, stderr=log, env=environment) as child:
            yield StrangerProcess(child, folder, json.loads(await child.line()))
