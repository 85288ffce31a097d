"""One real `peer` process of a test, and what it has reported so far."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import trio

from cli.progress.event_tail import EventTail

POLL_S: Final = 0.02


@dataclass(frozen=True)
class Fact:
    """One event of one peer; `at` is seconds since the Unix epoch."""

    at: float
    name: str
    fields: dict[str, Any]


@dataclass(eq=False)
class PeerProcess:
    """One `peer join` or `peer coordinate`. `facts` are its events so far, oldest first, over all of its lives."""

    name: str
    home: Path
    arguments: tuple[str, ...]
    process: subprocess.Popen[bytes]
    tail: EventTail
    facts: list[Fact] = field(default_factory=list)
    news: trio.Event = field(default_factory=trio.Event)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def round(self) -> int:
        """The last round it committed or adopted; 0 if none."""
        rounds = [f.fields["round"] for f in self.facts if f.name in ("round_committed", "head_adopted")]
        return int(rounds[-1]) if rounds else 0

    @property
    def commits(self) -> list[Fact]:
        return self.all("round_committed")

    @property
    def state_hash(self) -> str:
        """Of the last head it committed or adopted; "" if none."""
        hashes = [f.fields["state_hash"] for f in self.facts if f.name in ("round_committed", "head_adopted")]
        return str(hashes[-1]) if hashes else ""

    def all(self, name: str) -> list[Fact]:
        return [fact for fact in self.facts if fact.name == name]

    def mark(self) -> int:
        """A place in its facts, to wait only for what comes after it."""
        return len(self.facts)

    async def wait_for(
        self,
        name: str,
        where: Callable[[dict[str, Any]], bool] = lambda fields: True,
        since: int = 0,
        timeout_s: float = 300.0,
    ) -> Fact:
        """The first fact called `name` for which `where(fields)`, from place `since` on; waits until there is one."""
        found: list[Fact] = []

        def seen() -> bool:
            nonlocal since
            found.extend(fact for fact in self.facts[since:] if fact.name == name and where(fact.fields))
            since = len(self.facts)
            return bool(found)

        await self.until(seen, name, timeout_s)
        return found[0]

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
        """Until `condition()` holds; it is asked again after each new fact of this peer. Fails once it has ended."""
        with trio.move_on_after(timeout_s):
            while not condition():
                if not self.alive and not self.poll():
                    code = self.process.returncode
                    raise AssertionError(f"{self.name}: no {what}; it has ended with {code}.\n{self.transcript()}")
                await self.news.wait()
            return
        raise AssertionError(f"{self.name}: no {what} within {timeout_s:g} s.\n{self.transcript()}")

    @property
    def is_stopped(self) -> bool:
        """Whether it is frozen."""
        return state_of(self.process.pid) == "T"

    async def wait_exit(self, timeout_s: float = 300.0) -> int:
        """Its exit status; negative for the signal that ended it."""
        with trio.move_on_after(timeout_s):
            while self.process.poll() is None:
                await trio.sleep(POLL_S)
            self.poll()
            return int(self.process.returncode)
        raise AssertionError(f"{self.name} has not ended within {timeout_s:g} s.\n{self.transcript()}")

    async def wait_stopped(self, timeout_s: float = 300.0) -> None:
        """Until it is frozen (state T), by us or by a scripted fault."""
        with trio.move_on_after(timeout_s):
            while not self.is_stopped:
                await trio.sleep(POLL_S)
            return
        raise AssertionError(f"{self.name} was not frozen within {timeout_s:g} s.\n{self.transcript()}")

    def kill(self) -> None:
        """SIGKILL, as a power cut would; reaps it."""
        self.process.kill()
        self.process.wait()
        self.poll()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def longest_pause(self, since: float, until: float = float("inf")) -> float:
        """The longest time between two of its commits, of those in that span of time (seconds since the epoch)."""
        return max(self.pauses(since, until), default=0.0)

    def pauses(self, since: float, until: float = float("inf")) -> list[float]:
        """Seconds from `since` to its first commit after that, and from each commit to the next."""
        times = [since, *(fact.at for fact in self.commits if since <= fact.at <= until)]
        return [b - a for a, b in pairwise(times)]

    def transcript(self, lines: int = 40) -> str:
        """Its last facts and what it printed, for a failed test."""
        facts = "\n".join(f"  {fact.at:.2f} {fact.name} {fact.fields}" for fact in self.facts[-lines:])
        with suppress(OSError):
            printed = self.log.read_text(errors="replace")[-2000:]
            return f"{facts}\n  --- printed ---\n{printed}"
        return facts

    @property
    def log(self) -> Path:
        return self.home.with_suffix(".log")

    def poll(self) -> bool:
        """Read what it has reported since; whether that is anything. Its end is news too."""
        fresh = [Fact(*event) for event in self.tail.poll()]
        self.facts.extend(fresh)
        if fresh or not self.alive:
            self.news.set()
            self.news = trio.Event()
        return bool(fresh)


def state_of(pid: int) -> str:
    """R, S, T (stopped), Z ...; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""
