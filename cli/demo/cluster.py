"""The quickstart's cluster: its child processes, and every wait for an event of theirs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from cli.demo.child_processes import ChildPeer, Children
from cli.demo.monitoring import Monitor
from cli.demo.slowness import slowed
from cli.progress.progress import Progress
from cli.views.live import POLL_S, read_tails
from peer.errors import RoundError
from swarm.run.home import Home

LOOPBACK: Final = ("--listen", "/ip4/127.0.0.1/tcp/0")
START_S: Final = 300.0  # several processes import torch from a cold disk
FIRST_S: Final = 600.0  # until the first commit, on a machine with more peers than cores
SILENCE_S: Final = 180.0  # without a commit: waiting longer does not help
COORDINATOR: Final = "coordinator"


class LocalCluster:
    """One run in the folder `home`. Every wait ends with the awaited event or with a RoundError."""

    def __init__(
        self,
        home: Path,
        rounds: int,
        group: Children,
        progress: Progress,
        redraw: Callable[[], None],
        monitor: Monitor | None = None,
        data: Path | None = None,
    ) -> None:
        """`data`: the folder of the data set that the run trains on, if it does."""
        self.rounds: Final = rounds
        self.progress: Final = progress
        self._home = home
        self._invite = Home(home / COORDINATOR).invite
        self._group = group
        self._redraw, self._monitor = redraw, monitor
        self._data = () if data is None else ("--data", str(data))
        self.marks: Final[dict[int, str]] = {}
        """Faults and additions by the round that was committed last."""
        self._last_commit_at = time.monotonic()
        self._round = 0

    @property
    def children(self) -> dict[str, ChildPeer]:
        """All children by name."""
        return self._group.peers

    def begin(self) -> None:
        """Start the coordinator and wait for its invite; then the monitor."""
        self._group.start(COORDINATOR, self._home / COORDINATOR, self._coordinate(), threads=1)
        self.wait(START_S, "the coordinator prints its invite", self._invite.exists)
        if self._monitor is not None:
            self._monitor.begin(self._invite)
            self.progress.pin(f"monitor: {self._monitor.address()}")

    def _coordinate(self) -> list[str]:
        return ["coordinate", str(self._home / "run.toml"), *self._data, *LOOPBACK]

    def join(self, number: int) -> ChildPeer:
        """Start the peer with that number."""
        name = f"peer-{number}"
        arguments = ["join", str(self._invite), "--name", name, "--device", "cpu", "--threads", "1", *LOOPBACK]
        self.progress.peer(name)
        return self._group.start(name, self._home / name, arguments, threads=1)

    def kill(self, victim: ChildPeer) -> None:
        """Send SIGKILL."""
        victim.kill()
        self.progress.peer(victim.name).gone = "killed"
        self._mark("killed", victim, " (SIGKILL)")

    def add(self, number: int) -> ChildPeer:
        """Start one more peer during the run."""
        added = self.join(number)
        self._mark("added", added)
        return added

    def freeze(self, frozen: ChildPeer) -> None:
        """Send SIGSTOP."""
        frozen.freeze()
        self._mark("froze", frozen, " (SIGSTOP)")

    def thaw(self, frozen: ChildPeer) -> None:
        """Send SIGCONT."""
        frozen.thaw()
        self._mark("thawed", frozen, " (SIGCONT)")

    @contextmanager
    def slowed(self, slow: ChildPeer) -> Iterator[None]:
        """Inside the block stop its processes for most of the time."""
        self._mark("slowed", slow, " (SIGSTOP for most of the time)")
        with slowed(slow.process.pid):
            yield
        self._mark("sped up", slow)

    def _mark(self, what: str, child: ChildPeer, how: str = "") -> None:
        self.progress.note(f"{what} {child.name}{how}")
        number, text = self.progress.round, f"{what} {child.name}"
        self.marks[number] = f"{self.marks[number]}, {text}" if number in self.marks else text

    def choose_victim(self, children: Sequence[ChildPeer]) -> ChildPeer:
        """Choose a replica of the stage that has most of these children."""
        stages = Counter(self.progress.peer(child.name).claims.stage for child in children)
        return max(children, key=lambda child: (stages[self.progress.peer(child.name).claims.stage], child.name))

    def rounds_from_now(self, count: int) -> Callable[[], bool]:
        wanted = min(self.progress.round + count, self.rounds)
        return lambda: self.progress.round >= wanted

    def wait(self, limit_s: float | None, what: str, done: Callable[[], bool]) -> None:
        """Wait until `done()`: for `limit_s` at most, or without a limit as long as rounds are committed.

        `what` is a clause for the error: "it has happened".
        """
        began = time.monotonic()
        while not done():
            self._read_events()
            now = time.monotonic()
            if limit_s is not None and now - began > limit_s:
                raise RoundError(f"waited {limit_s:.0f} s until {what}: read the logs in {self._home}")
            silence_s = SILENCE_S if self._round else FIRST_S
            if limit_s is None and now - max(self._last_commit_at, began) > silence_s:
                silence = f"no round was committed for {silence_s:.0f} s"
                raise RoundError(f"waited until {what}, but {silence}: read the logs in {self._home}")
            time.sleep(POLL_S)
        self._read_events()

    def _read_events(self) -> None:
        """Read the children's events. Raises RoundError if one has died."""
        tails = {child.name: child.events for child in self._group.peers.values()}
        read_tails(self.progress, tails)
        if self.progress.round > self._round:
            self._round, self._last_commit_at = self.progress.round, time.monotonic()
        for child in self._group.peers.values():
            if child.alive or child.until is not None:
                continue
            child.until = time.time()
            if child.process.returncode != 0:
                ended = f"{child.name} ended with exit code {child.process.returncode} ({child.log_tail()})"
                raise RoundError(f"{ended}: read the logs in {self._home}")
        self._redraw()


def choose_frozen(stages: Mapping[str, int | None], killed_in: int | None) -> str:
    """Choose the child to freeze from the stages of the living by name.

    It prefers a stage that has another replica, then a stage other than `killed_in`, which has just lost one.
    """
    count = Counter(stages.values())
    return max(stages, key=lambda name: (count[stages[name]] > 1, stages[name] != killed_in, count[stages[name]], name))
