"""The pause of a peer by this machine's owner: whether it rests, why, and until when.

`peer pause` writes the file `paused` in the peer's home, `peer resume` removes it; the peer looks at it twice a second.
It is a file so that a paused peer that is started again stays paused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Annotated, Final, Protocol

import msgspec
import trio

from peer.catalogue.machine import PeerPaused, PeerResumed
from peer.events import EventLog
from peer.files import write_atomically
from peer.notifier import Notifier

LOOK_S: Final = 0.5
CONDITION_S: Final = 2.0  # between two looks at conditions, which takes some milliseconds
PAUSED: Final = "paused by its owner"
"""The phase of such a peer, as others read it. Why is no matter of theirs."""
_BYTES_MAX: Final = 4096
_LAST: Final = 253402300800.0  # the year 10000


class PauseRequest(msgspec.Struct, frozen=True):
    """The content of the file."""

    until: Annotated[float, msgspec.Meta(ge=0, le=_LAST)] | None = None
    """When the pause ends by itself, in seconds since the Unix epoch."""


def write_request(file: Path, request: PauseRequest) -> None:
    """Raises ResourceError."""
    write_atomically(file, msgspec.json.encode(request))


def read_request(file: Path, now: float) -> PauseRequest | None:
    """Return what holds now; None where nothing is asked for. A file that cannot be read is a pause without an end:
    it was asked for."""
    try:
        with file.open("rb") as opened:
            request = msgspec.json.decode(opened.read(_BYTES_MAX), type=PauseRequest)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError):
        return PauseRequest()
    return request if request.until is None or now < request.until else None


class OwnersPause:
    """Whether the peer rests: because of the file, or as `condition` says why; empty: it need not. `run` looks.

    Events: `peer_paused`, with the reason, and `peer_resumed`."""

    def __init__(self, events: EventLog, file: Path, condition: Callable[[], str] = str) -> None:
        self.reason = ""
        """Why the peer rests; empty while it works."""
        self._events, self._file, self._condition = events, file, condition
        self._holds = ""  # as the condition last said
        self._changed = Notifier()

    @property
    def paused(self) -> bool:
        return bool(self.reason)

    def look(self) -> None:
        """Find out what holds now."""
        self._holds = self._condition()
        self._decide()

    def _decide(self) -> None:
        before, request = self.reason, read_request(self._file, time.time())
        self.reason = self._holds if request is None else _asked_for(request)
        if self.reason and self.reason != before:
            self._events.emit(PeerPaused(reason=self.reason))
        elif before and not self.reason:
            self._events.emit(PeerResumed())
        if bool(before) != self.paused:
            self._changed.notify()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        for number in count():
            if number % round(CONDITION_S / LOOK_S) == 0:
                self._holds = await trio.to_thread.run_sync(self._condition)
            self._decide()
            await trio.sleep(LOOK_S)

    async def until(self, paused: bool) -> None:
        """Wait until the peer rests, or works."""
        while self.paused != paused:
            await self._changed.wait()


class Pausable(Protocol):
    """The trainer."""

    async def pause(self) -> None:
        """Give the device back to its owner."""

    async def resume(self) -> None:
        """Be able to train again."""


async def obey(pause: OwnersPause, trainer: Pausable, tell: Callable[[bool], None] = lambda paused: None) -> None:
    """Pause and resume a trainer as its owner wants, until cancelled. `tell` is called for a pause at once, and for its
    end once the trainer can train: others then rely on its work. A pause meanwhile aborts the start."""
    while True:
        await pause.until(paused=True)
        tell(True)
        await trainer.pause()
        await pause.until(paused=False)
        async with trio.open_nursery() as nursery:

            async def stop() -> None:
                await pause.until(paused=True)
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop)
            await trainer.resume()
            tell(False)
            nursery.cancel_scope.cancel()


def _asked_for(request: PauseRequest) -> str:
    if request.until is None:
        return "`peer pause` asked for it"
    return f"`peer pause` asked for it until {time.strftime('%Y-%m-%d %H:%M', time.localtime(request.until))}"
