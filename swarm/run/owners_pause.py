"""The pause of a peer by this machine's owner: whether it rests, why, and until when.

`peer pause` writes the file `paused` in the peer's home, `peer resume` removes it; the peer looks at it twice a second.
It is a file so that a paused peer that is started again stays paused.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.events import EventLog
from peer.files import write_atomically

LOOK_S: Final = 0.5
PAUSED: Final = "paused by its owner"
"""The phase of such a peer, as others read it. Why is no matter of theirs."""
_BYTES_MAX: Final = 4096


class PauseRequest(msgspec.Struct, frozen=True):
    """What the file says."""

    until: float | None = None
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


Condition = Callable[[], str]
"""Returns why the peer should rest now, empty if it need not."""


class OwnersPause:
    """Whether the peer rests. `run` looks; events `peer_paused`, with the reason, and `peer_resumed`."""

    def __init__(self, events: EventLog, file: Path, condition: Condition = str) -> None:
        self.reason = ""
        """Why the peer rests; empty while it works."""
        self._events, self._file, self._condition = events, file, condition
        self._changed = trio.Event()

    @property
    def paused(self) -> bool:
        return bool(self.reason)

    def look(self) -> None:
        """Find out what holds now."""
        before, request = self.reason, read_request(self._file, time.time())
        self.reason = self._condition() if request is None else _asked_for(request)
        if self.reason and self.reason != before:
            self._events.emit("peer_paused", reason=self.reason)
        elif before and not self.reason:
            self._events.emit("peer_resumed")
        if bool(before) != self.paused:
            self._changed.set()
            self._changed = trio.Event()

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            self.look()
            await trio.sleep(LOOK_S)

    async def until(self, paused: bool) -> None:
        """Wait until the peer rests, or works."""
        while self.paused != paused:
            await self._changed.wait()


def _asked_for(request: PauseRequest) -> str:
    if request.until is None:
        return "`peer pause` asked for it"
    return f"`peer pause` asked for it until {time.strftime('%Y-%m-%d %H:%M', time.localtime(request.until))}"
