"""What an authority must not forget: its last signature, the last head that it saw committed, and recent heads.

Recent heads are kept by their hashes, with their members: a group that has lost its last commit goes back to an earlier
one only if the authority remembers it. The coordinator keeps all this on disk, so a restart loses none of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from peer.bounds import MEMBERS_MAX, Hash, Name, UnixTime
from peer.decoding import MALFORMED, told
from peer.errors import CheckpointError
from peer.files import read_bounded, write_atomically
from peer.identity import Signed
from swarm.protocol.head import Head
from swarm.run.home import Home

HEADS_MAX: Final = 1024
FILE_BYTES_MAX: Final = 8 << 20  # a head of 4096 members, as many names and all hashes take less than 1 MiB

Stored = TypeVar("Stored")
Key = TypeVar("Key", bytes, str)


class SeenHead(msgspec.Struct, frozen=True):
    """The last head and recent ones. Times are Unix times, the latest at the end."""

    head: Head
    """The last one."""
    heads: Annotated[dict[Hash, UnixTime], msgspec.Meta(max_length=HEADS_MAX)] = {}
    """When each recent head was last seen, by its hash."""
    members: Annotated[dict[Name, UnixTime], msgspec.Meta(max_length=MEMBERS_MAX)] = {}
    """When each peer was last a member of a recent head."""

    def then(self, head: Head, now: float, back_s: float) -> SeenHead:
        """Return what to remember once `head` was seen at `now`: nothing that is more than `back_s` older."""
        # The commit before it counts too: not every one of fast commits is polled.
        names = [name for name in (head.previous, head.hash) if name]
        peers = [member.peer for member in head.members]
        return SeenHead(
            head,
            _latest(self.heads, dict.fromkeys(names, now), now - back_s, HEADS_MAX),
            _latest(self.members, dict.fromkeys(peers, now), now - back_s, MEMBERS_MAX),
        )


class DurableState:
    """The memory of one group's authority, in this process. `signed`: None before the group has begun."""

    def __init__(self, signed: Signed | None = None, seen: SeenHead | None = None) -> None:
        self.signed = signed
        self.seen = seen

    def keep(self, signed: Signed) -> None:
        """Keep a regroup that the authority has signed."""
        self.signed = signed

    def see(self, head: Head, back_s: float) -> None:
        """Make `head` the last one. Forget what is more than `back_s` seconds older."""
        self.seen = self._with(head, back_s)

    def _with(self, head: Head, back_s: float) -> SeenHead:
        return (self.seen or SeenHead(head)).then(head, time.time(), back_s)

    def saw(self, head: bytes) -> bool:
        """Return whether the head of that hash was committed within the remembered time."""
        return self.seen is not None and head in self.seen.heads

    def knew(self, peer: str) -> bool:
        """Return whether that peer was a member within that time."""
        return self.seen is not None and peer in self.seen.members


class FileState(DurableState):
    """The same, kept in `home`. Each change is on disk before it counts.

    Raises CheckpointError if the files there cannot be read: guessing could fork the run.
    """

    def __init__(self, home: Home) -> None:
        super().__init__(_read(home.regroup, Signed), _read(home.seen, SeenHead))
        self._home = home

    def keep(self, signed: Signed) -> None:
        write_atomically(self._home.regroup, msgspec.msgpack.encode(signed))
        super().keep(signed)

    def see(self, head: Head, back_s: float) -> None:
        seen = self._with(head, back_s)
        write_atomically(self._home.seen, msgspec.msgpack.encode(seen))
        self.seen = seen


def _latest(old: dict[Key, float], new: dict[Key, float], since: float, most: int) -> dict[Key, float]:
    """Merge both, without what is older than `since`. Of more than `most` entries keep the latest."""
    kept = {name: at for name, at in old.items() if at >= since and name not in new} | new
    return dict(list(kept.items())[-most:])


def _read(path: Path, kind: type[Stored]) -> Stored | None:
    if not path.exists():
        return None
    try:
        return msgspec.msgpack.decode(read_bounded(path, FILE_BYTES_MAX), type=kind)
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{path} is damaged ({told(error)}): restore it from a backup") from error
