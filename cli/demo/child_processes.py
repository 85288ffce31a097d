"""Child processes that run `peer` commands as a user would, and never outlive this process.

Each child has the read end of a pipe as its standard input and leaves when that pipe closes (`--tied`), even if this
process dies by SIGKILL. A frozen child (SIGSTOP) cannot notice: on Linux the kernel thaws it when this process dies;
elsewhere it stays frozen until it gets SIGCONT. A child's output goes to a log file beside its home.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Final

from cli.progress.event_tail import EventTail
from peer.errors import ResourceError
from swarm.run.home import Home

_LEAVE_S: Final = 20.0  # from SIGINT, which lets a child save and leave, to SIGKILL
_PR_SET_PDEATHSIG: Final = 1
_LIBC: Final = ctypes.CDLL(None)  # loaded here: nothing may be loaded between fork and exec

Place = Callable[[list[str]], list[str]]


@dataclass
class ChildPeer:
    """One child. Times are Unix times."""

    name: str
    home: Path
    process: subprocess.Popen[bytes]
    events: EventTail
    since: float
    killed: bool = False
    """Whether this process killed it on purpose."""
    until: float | None = None

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def kill(self) -> None:
        """Send SIGKILL, like a power cut."""
        self.killed = True
        self.process.kill()
        self.process.wait()
        self.until = time.time()

    def freeze(self) -> None:
        """Send SIGSTOP, like a machine that swaps or a laptop whose lid is closed."""
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def log_tail(self, lines: int = 3) -> str:
        """Return the end of its log, for an error message."""
        try:
            text = log_path(self.home).read_text(errors="replace")
        except OSError:
            return ""
        return " | ".join(line.strip() for line in text.strip().splitlines()[-lines:])


def log_path(home: Path) -> Path:
    return home.with_name(home.name + ".log")


@dataclass
class Children:
    """The children by name, in the order of their start."""

    peers: dict[str, ChildPeer] = field(default_factory=dict)

    def start(
        self, name: str, home: Path, arguments: Sequence[str], threads: int, place: Place | None = None
    ) -> ChildPeer:
        """Run `peer ARGUMENTS --home HOME --tied` with `threads` compute threads, 0 for as many as it takes. `place`
        wraps the command so that it runs elsewhere, as in a network namespace."""
        process = start_tied([*arguments, "--home", str(home), "--tied"], log_path(home), threads, place)
        child = ChildPeer(name, home, process, EventTail(Home(home).events), time.time())
        self.peers[name] = child
        return child

    def living(self) -> Iterator[ChildPeer]:
        return (child for child in self.peers.values() if child.alive)

    def end_all(self) -> None:
        """Ask every child to leave, wait, and kill those that have not left."""
        for child in self.living():
            child.process.send_signal(signal.SIGINT)
            child.thaw()
        deadline = time.monotonic() + _LEAVE_S
        for child in self.peers.values():
            _await_end(child.process, deadline)
            child.events.close()


def start_tied(
    arguments: Sequence[str], log_file: Path, threads: int, place: Place | None = None
) -> subprocess.Popen[bytes]:
    """Run `peer ARGUMENTS`, which say `--tied`, with its output in that file; see `Children.start`."""
    command = [sys.executable, "-m", "cli.main", *arguments]
    if place is not None:
        command = place(command)
    environment = {**os.environ, "PYTHONUNBUFFERED": "1"}
    if threads:
        environment["OMP_NUM_THREADS"] = str(threads)
    environment["PYTHONSAFEPATH"] = "1"  # do not import a folder `peer` of the working directory
    try:
        log_file.parent.mkdir(parents=True, exist_ok=True)
        log: IO[bytes] = log_file.open("wb")
    except OSError as error:
        raise ResourceError(f"cannot write to {log_file.parent} ({error.strerror}): choose another --home") from error
    with log:
        return subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=log, stderr=subprocess.STDOUT, env=environment,
            start_new_session=True,  # Ctrl-C at the terminal reaches this process only
            preexec_fn=_thaw_when_parent_dies if sys.platform == "linux" else None,
        )  # fmt: skip


def end_child(process: subprocess.Popen[bytes]) -> None:
    """Ask a child to leave, wait, and kill it if it has not left."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    _await_end(process, time.monotonic() + _LEAVE_S)


def _await_end(process: subprocess.Popen[bytes], deadline: float) -> None:
    try:
        process.wait(max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _thaw_when_parent_dies() -> None:
    """Ask the kernel for SIGCONT when the parent dies. Runs in the child before `exec`."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGCONT)


@contextmanager
def children() -> Iterator[Children]:
    """Yield a group whose children have all ended when the block ends, however it ends."""
    group = Children()
    try:
        yield group
    finally:
        group.end_all()
