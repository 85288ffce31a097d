"""The events of servers of blocks: what they load, serve and move to."""

from __future__ import annotations

from typing import ClassVar

from peer.catalogue.happening import Happening


class BlocksServed(Happening, frozen=True):
    """The server takes sessions for its blocks, `first` to before `end`."""

    first: int
    end: int
    pages: int | None = None


class CommitServed(Happening, frozen=True):
    said: ClassVar = '{teller} serves round {round}, and later ones: `peer generate INVITE "..."` asks it'
    round: int
    commit: str = ""


class CommitUnserved(Happening, frozen=True):
    said: ClassVar = "{teller} cannot serve round {round} ({reason}): it waits for the next one"
    round: int
    reason: str


class LoadChanged(Happening, frozen=True):
    """The load of a server, once a second at most."""

    sessions: int = 0
    clients: int = 0
    waiting_tokens: int = 0
    tokens: int = 0
    """Served since it began."""
    pages: int = 0
    pages_free: int = 0
    step_ms: float = 0.0


class LoadingBegun(Happening, frozen=True):
    """A phase begins in which bytes are read, checked, fetched or loaded (`peer.loading.Phase`)."""

    phase: str
    size_bytes: int = 0


class LoadingEnded(Happening, frozen=True):
    """The phase has ended."""

    phase: str
    size_bytes: int = 0
    seconds: float = 0.0


class LoadingProgress(Happening, frozen=True):
    """Bytes of the phase so far."""

    phase: str
    done_bytes: int = 0
    size_bytes: int = 0


class ModelEntered(Happening, frozen=True):
    """The server knows its model."""

    name: str
    blocks: int
    chat_template: str
    """Which one answers use, in words."""


class ServerMoves(Happening, frozen=True):
    """Other blocks need this machine more."""

    first: int
    end: int
