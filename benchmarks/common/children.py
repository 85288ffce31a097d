"""Child processes driven by JSON lines. Every read has a deadline; every child is ended."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
START_S = 300.0  # for a child that imports torch beside others


class ChildFailed(Exception):
    """A child ended early or did not answer in time."""


def begin(peers: Sequence[Child], group: Sequence[dict[str, Any]]) -> None:
    """Send the group to all peers and start once all can be called; a peer that cannot would miss the first round."""
    for peer in peers:
        peer.tell({"group": group})
    for peer in peers:
        peer.read(START_S)
    for peer in peers:
        peer.tell({"go": True})


@contextmanager
def open_group(starts: Sequence[Callable[[], Child]]) -> Iterator[tuple[list[Child], list[dict[str, Any]]]]:
    """Start the peers of a group for the block, and begin. The first one starts alone, as it makes the files that all
    share. Yields the children and what they said of themselves."""
    with ExitStack() as stack:
        children: list[Child] = []
        group: list[dict[str, Any]] = []
        for start in starts:
            child = start()
            stack.callback(child.end)
            children.append(child)
            if not group:
                group = [child.read(START_S)]
        group += [child.read(START_S) for child in children[1:]]
        begin(children, group)
        yield children, group


class Child:
    """A process `python -m MODULE ARGUMENTS` with its own process group: daemons that it starts end and freeze with
    it."""

    def __init__(
        self,
        module: str,
        *arguments: object,
        env: dict[str, str] | None = None,
        place: Callable[..., list[str]] = lambda *command: [*command],
    ) -> None:
        """Start the process. `place` wraps the command so that it runs elsewhere (`shaped_lan`)."""
        self._stderr = tempfile.TemporaryFile()  # noqa: SIM115 - closed by `end`
        self._process = subprocess.Popen(
            place(sys.executable, "-m", module, *map(str, arguments)),
            cwd=ROOT,  # -m: beside this file, `dht` would be the benchmark of that name
            env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            bufsize=0,
            start_new_session=True,
        )
        self._ahead = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def tell(self, message: dict[str, Any]) -> None:
        """Send one line. The next read reports a child that has ended."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(message).encode() + b"\n")

    def read(self, timeout_s: float) -> dict[str, Any]:
        """Return the child's next line. `ChildFailed` if it has ended or is silent for `timeout_s` seconds."""
        assert self._process.stdout is not None
        until = time.monotonic() + timeout_s
        while b"\n" not in self._ahead:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - time.monotonic()))
            if not ready:
                raise ChildFailed(f"{self._name} was silent for {timeout_s:g} s{self._last_words()}")
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise ChildFailed(f"{self._name} ended early{self._last_words()}")
            self._ahead += piece
        line, _, self._ahead = self._ahead.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, number)

    def end(self) -> None:
        """Kill the child and its children, frozen or not, and wait for its end."""
        self.signal(signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._stderr):
            if stream is not None:
                stream.close()

    @property
    def _name(self) -> str:
        return f"the process `{' '.join(map(str, self._process.args[1:]))}`"  # type: ignore[index]

    def _last_words(self) -> str:
        self._stderr.seek(0)
        lines = self._stderr.read().decode(errors="replace").strip().splitlines()
        return f" (last words: {lines[-1].strip()})" if lines else ""
