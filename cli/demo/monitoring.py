"""The monitor beside a quickstart: a `peer monitor` of its own process, whose page stays when the run is over."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import msgspec

from cli.demo.child_processes import end_child, start_tied
from peer.decoding import MALFORMED

PAGE: Final = "monitor"
"""The folder of the page."""
START_S: Final = 60.0
OVER_S: Final = 20.0
"""From the end of the run until the monitor has seen it: a few of its readings."""
_POLL_S: Final = 0.1


class Monitor:
    """`peer monitor` for the run of a quickstart, from `begin` to the end of the block. If it fails, the
    quickstart continues without it: nothing in the run depends on it."""

    def __init__(self, home: Path) -> None:
        self.page: Final = home / PAGE / "index.html"
        self._home, self._log = home, home / f"{PAGE}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Monitor:
        return self

    def __exit__(self, *exc: object) -> None:
        """End it: it writes its page a last time."""
        if self._process is not None:
            end_child(self._process)

    def begin(self, invite: Path) -> None:
        """Start it, on a free port of this machine."""
        files = ["--db", str(self._home / f"{PAGE}.db"), "--publish", str(self._home / PAGE)]
        arguments = ["monitor", str(invite), "--listen", "127.0.0.1:0", *files, "--json", "--tied"]
        self._process = start_tied(arguments, self._log, threads=1)

    def address(self) -> str:
        """Return where it is to be seen, once it listens, or why it is not."""
        return self._until(START_S, lambda fact: fact.get("event") == "listening", "page")

    def see_the_end(self) -> None:
        """Wait until it has seen that the run is over, so that its page shows the whole run."""
        self._until(OVER_S, lambda fact: fact.get("level") == "over", "word")

    @property
    def last_words(self) -> str:
        """Return where the page is that it leaves, and what is missing there."""
        if not self.page.exists():
            return f"The monitor left no page: read {self._log}"
        seen = any(fact.get("level") == "over" for fact in self._facts())
        short = "" if seen else f"; it did not see the end of the run: read {self._log}"
        return f"The page of the monitor, which needs no server: {self.page}{short}"

    def _until(self, limit_s: float, wanted: Callable[[dict[str, Any]], bool], field: str) -> str:
        """Return that field of the fact that is waited for; without one, where to read why."""
        deadline = time.monotonic() + limit_s
        while self._process is not None and self._process.poll() is None and time.monotonic() < deadline:
            if found := next(filter(wanted, self._facts()), None):
                return str(found.get(field))
            time.sleep(_POLL_S)
        return f"it does not answer: read {self._log}"

    def _facts(self) -> list[dict[str, Any]]:
        """Return what it has told as JSON lines; what else it says there is for the reader of its log."""
        found = []
        try:
            lines = self._log.read_bytes().splitlines()
        except OSError:
            return []
        for line in lines:
            try:
                found.append(msgspec.json.decode(line, type=dict[str, Any]))
            except MALFORMED:
                continue
        return found
