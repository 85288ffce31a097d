"""Installs with pip, and says how far it is.

    .venv/bin/python tools/install.py WHAT [PIP OPTIONS]

On a terminal one line that is rewritten, else a line every 15 s. What pip and the packages' own builds warn of is shown
only if the installation fails; the exit code is pip's. It needs nothing but Python.
"""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import threading
import time
from pathlib import Path
from typing import Final

SITE: Final = Path(sysconfig.get_path("purelib"))
SAID_EVERY_S: Final = 15.0
COLUMNS: Final = 78
TOLD_AT_FAILURE: Final = 40
"""Lines of pip's output."""
PARTS: Final = (
    (re.compile(r"\s*Collecting ([\w.\-\[\]]+)"), "looks for {}"),
    (re.compile(r"\s*Downloading (?:\S*/)?([\w.]+-[\w.]+)\S* \(([^)]+)\)"), "downloads {}, {}"),
    (re.compile(r"\s*Building (?:wheel|editable) for ([\w.\-]+)"), "builds {}"),
    (re.compile(r"Installing collected packages: (.*)"), "installs"),
)


def installed() -> int:
    """Return how many packages there are."""
    return sum(1 for _ in SITE.glob("*.dist-info"))


class Follower:
    """What pip does now, and how far it is."""

    def __init__(self, said_every_s: float = SAID_EVERY_S) -> None:
        self._said_every_s = said_every_s
        self.output: list[str] = []
        self._doing = "reads what is wanted"
        self._found = self._wanted = 0
        self._before = installed()
        self._began, self._is_terminal = time.monotonic(), sys.stderr.isatty()
        self._said, self._drawn = self._began, 0

    def take(self, line: str) -> None:
        """Read a line of pip's output."""
        self.output.append(line)
        for pattern, doing in PARTS:
            if found := pattern.match(line):
                self._doing = doing.format(*found.groups())
                self._found += doing.startswith("looks")
                if doing == "installs":
                    self._wanted = found[1].count(",") + 1
                return

    def show(self) -> None:
        """Write how far it is, if it is time."""
        now = time.monotonic()
        if not self._is_terminal and now - self._said < self._said_every_s:
            return
        self._said = now
        far = f"{self._found} packages found"
        if self._wanted:
            there = min(self._wanted, installed() - self._before)
            far = f"{there} of {self._wanted} packages are in place"
        line = f"set-up: {now - self._began:.0f} s, {far}; {self._doing}"[:COLUMNS]
        if self._is_terminal:
            sys.stderr.write(f"\r{line:<{self._drawn}}")
            self._drawn = len(line)
        else:
            sys.stderr.write(f"{line}\n")
        sys.stderr.flush()

    def end(self, is_done: bool) -> None:
        """Write how it ended."""
        seconds = time.monotonic() - self._began
        head = "\r" + " " * self._drawn + "\r" if self._is_terminal else ""
        if is_done:
            told = f"packages installed: {self._wanted}" if self._wanted else "nothing to install"
            sys.stderr.write(f"{head}set-up: {told}, in {seconds:.0f} s\n")
            return
        lines = [line for line in self.output if not line.startswith("WARNING")][-TOLD_AT_FAILURE:]
        sys.stderr.write(f"{head}{''.join(lines)}set-up: pip failed; its last lines are above\n")


def main() -> int:
    """Install what the arguments name; return pip's exit code."""
    command = [sys.executable, "-m", "pip", "install", "--no-input", "--progress-bar", "off", *sys.argv[1:]]
    follower = Follower()
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    ) as pip:
        assert pip.stdout is not None
        is_over = threading.Event()

        def draw() -> None:
            while not is_over.wait(0.3):
                follower.show()

        drawer = threading.Thread(target=draw, daemon=True)
        drawer.start()
        for line in pip.stdout:
            follower.take(line)
        code = pip.wait()
        is_over.set()
        drawer.join()
    follower.end(code == 0)
    return code


if __name__ == "__main__":
    sys.exit(main())
