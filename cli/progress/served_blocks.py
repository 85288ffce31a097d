"""What the events of a block server add up to; `cli.views.served_blocks` draws it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Final

from cli.progress.live_peer import WorkDone
from cli.progress.progress import plain_fields
from peer.catalogue import serving
from peer.catalogue.happening import Happening
from peer.catalogue.machine import WorkerDied, WorkerReady
from peer.catalogue.reading import happening
from peer.figures import duration_text, size_text

SECONDS: Final = 5.0
"""The time of which the rate of tokens is."""
_COUNTS_MAX: Final = 64
_DOING: Final = {
    "read": ("Reading the checkpoint", "Read the checkpoint"),
    "check": ("Checking the weights", "Checked the weights"),
    "fetch": ("Fetching the weights", "Fetched the weights"),
    "load": ("Loading the blocks", "Loaded the blocks"),
}


@dataclass
class LoadingPhase(WorkDone):
    """A phase in which bytes are read, fetched or loaded."""

    phase: str = ""
    has_begun: bool = False
    """Whether its beginning was told; not of a worker in the place of another, which is done when it is ready."""

    @property
    def doing(self) -> str:
        return _DOING.get(self.phase, (self.phase, self.phase))[0]


@dataclass
class ServedBlocks:
    """What one block server does. Feed it with `apply`."""

    title: str
    note: Callable[[str], None]
    """Takes what a person is told once, a plain line."""
    name: str = ""
    """Of the model or run; empty before it is known."""
    blocks: int = 0
    """Of the model."""
    span: tuple[int, int] | None = None
    """The blocks that are served now, first and the one behind the last."""
    served_at: float | None = None
    """When it began to serve, Unix time; None before."""
    load: serving.LoadChanged = field(default_factory=serving.LoadChanged)
    """Its last event about its load."""
    loading: LoadingPhase | None = None
    moves: int = 0
    address: str = ""
    short: str = ""
    """What stands for the invite on this machine."""
    now: Callable[[], float] = time.time
    say: Callable[[str], None] | None = None
    """Called with the beginning and end of each phase, where there is no terminal to redraw."""
    _counts: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_COUNTS_MAX))
    """Tokens by the time when they were counted."""

    def apply(self, name: str, event: str, at: float, fields: Mapping[str, Any]) -> None:
        """Take in one event. Those of no interest to a person are ignored, and so is one whose fields are not what it
        should have: a worker has sent some of them."""
        with suppress(ArithmeticError, ValueError):
            self._apply(happening(event, plain_fields(fields)), at)

    def _apply(self, event: Happening | None, at: float) -> None:
        match event:
            case serving.ModelEntered():
                self.note(event.chat_template)
                self.name, self.blocks = event.name, event.blocks
            case WorkerDied():
                self.note(f"The worker has died ({event.cause}); a new one starts.")
            case serving.CommitServed():
                self.note(f"Serving the commit of round {event.round}.")
            case serving.CommitUnserved():
                self.note(
                    f"The commit of round {event.round} cannot be served ({event.reason}): waiting for the next one."
                )
            case serving.BlocksServed():
                self.span, self.loading = (event.first, event.end), None
                self.served_at = self.served_at or at
            case serving.ServerMoves():
                self.note(f"Other blocks need this machine more: moving to {event.first} to {event.end}.")
                self.span, self.moves = None, self.moves + 1
            case serving.LoadChanged():
                self.load = event
                self._counts.append((at, event.tokens))
            case serving.LoadingBegun() | serving.LoadingProgress() | serving.LoadingEnded():
                self._follow(event, at)
            case WorkerReady() if self.loading is not None and not self.loading.has_begun:
                self.loading = None

    @property
    def tokens_per_s(self) -> float:
        """Of the last `SECONDS`."""
        begin = self.now() - SECONDS
        before = [count for at, count in self._counts if at <= begin]
        if not self._counts:
            return 0.0
        return max(0.0, self._counts[-1][1] - (before[-1] if before else self._counts[0][1])) / SECONDS

    def _follow(self, event: serving.LoadingBegun | serving.LoadingProgress | serving.LoadingEnded, at: float) -> None:
        phase, size_bytes = event.phase, event.size_bytes
        if isinstance(event, serving.LoadingEnded):
            if self.loading is not None:
                took = duration_text(round(event.seconds, 1))
                self._tell(f"{_DOING.get(phase, (phase, phase))[1]}: {size_text(size_bytes)} in {took}.")
            self.loading = None
            return
        if self.loading is None or self.loading.phase != phase:
            self.loading = LoadingPhase(size_bytes, at, phase=phase)
        if isinstance(event, serving.LoadingBegun):
            self.loading.has_begun = True
            self._tell(f"{self.loading.doing}: {size_text(size_bytes)} ...")
        else:
            self.loading.done, self.loading.at = event.done_bytes, at
            self.loading.size = size_bytes

    def _tell(self, line: str) -> None:
        """Say a line about a phase, unless blocks are served meanwhile: a run has a commit every few seconds."""
        if self.say is not None and self.span is None:
            self.say(line)
