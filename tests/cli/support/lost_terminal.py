"""Processes whose terminal goes away, as at a logout or when an ssh connection is lost."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import termios
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
SIDE: Final = "TEST_SIDE"
"""The variable that names a descriptor on which the process tells what no terminal shows."""


class LosableTerminal:
    """A pseudo-terminal and the process that a person has started there."""

    def __init__(self, command: Sequence[str], folder: Path, has_control: bool, environment: dict[str, str]) -> None:
        """`has_control`: the terminal tells its end to the process by SIGHUP."""
        self._ours, theirs = pty.openpty()
        side, its_side = os.pipe()
        self._side, self.shown = os.fdopen(side), b""

        def take_control() -> None:
            signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
            if has_control:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            command, stdin=theirs, stdout=theirs, stderr=theirs, cwd=folder, start_new_session=True,
            env=environment | {SIDE: str(its_side)}, pass_fds=(its_side,), preexec_fn=take_control,
        )  # fmt: skip
        os.close(theirs)
        os.close(its_side)

    def until(self, *words: str) -> None:
        """Read until each is shown."""
        while not all(word.encode() in self.shown for word in words):
            try:
                self.shown += os.read(self._ours, 1 << 16)
            except OSError as ended:
                raise AssertionError(self.shown.decode(errors="replace")) from ended

    def type(self, line: str) -> None:
        os.write(self._ours, f"{line}\n".encode())

    def lose(self) -> None:
        """Close the window."""
        os.close(self._ours)
        self._ours = -1

    def told(self) -> str:
        """Return the next line that the process tells beside the terminal; "" once it has ended."""
        return self._side.readline().strip()

    def close(self) -> None:
        if self._ours >= 0:
            self.lose()
        self.process.kill()
        self.process.wait()
        self._side.close()


@contextmanager
def losable_terminal(
    *command: str, folder: Path = ROOT, has_control: bool = True, **environment: str
) -> Iterator[LosableTerminal]:
    """Run a command in a terminal until the block ends."""
    needs = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "TERM": "xterm-256color"}
    terminal = LosableTerminal(command, folder, has_control, {**os.environ, **needs, **environment})
    try:
        yield terminal
    finally:
        terminal.close()
