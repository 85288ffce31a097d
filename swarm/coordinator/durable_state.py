"""What an authority must not forget: its last signature, the last head that it saw committed, and what it saw before.

Heads of the last while are kept by their hashes, with who was a member: a group that has lost its last commit goes back
to an earlier one only if that is remembered. The coordinator's memory is on disk, so that a restart costs none of it.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Final, TypeVar

import msgspec

from peer.decoding import MALFORMED
from peer.errors import CheckpointError
from peer.files import write_atomically
from peer.identity import Signed
from swarm.protocol.head import MEMBERS_MAX, Hash, Head, Name
from swarm.run.home import Home

HEADS_MAX: Final = 1024
FILE_BYTES_MAX: Final = 8 << 20  # a head of 4096 members, as many names and all hashes are less than one

Stored = TypeVar("Stored")
Key = TypeVar("Key", bytes, str)


class SeenHead(msgspec.Struct, frozen=True):
    """The last head, and of the time before it: `heads` by their hashes, and who was a member of one (`members`), each
    with when that was last, Unix time, the latest at the end."""

    head: Head
    heads: Annotated[dict[Hash, float], msgspec.Meta(max_length=HEADS_MAX)] = {}
    members: Annotated[dict[Name, float], msgspec.Meta(max_length=MEMBERS_MAX)] = {}

    def then(self, head: Head, now: float, back_s: float) -> SeenHead:
        """What there is to remember once `head` was seen at `now`: nothing that is more than `back_s` older."""
        # The commit before it counts too: where commits come fast not all of them are looked at.
        names = [name for name in (head.previous, head.hash) if name]
        peers = [member.peer for member in head.members]
        return SeenHead(
            head,
            _latest(self.heads, dict.fromkeys(names, now), now - back_s, HEADS_MAX),
            _latest(self.members, dict.fromkeys(peers, now), now - back_s, MEMBERS_MAX),
        )


class DurableState:
    """`signed`: None before the run has begun. This memory lives as long as the process."""

    def __init__(self, signed: Signed | None = None, seen: SeenHead | None = None) -> None:
        self.signed = signed
        self.seen = seen

    def keep(self, signed: Signed) -> None:
        """The authority has signed a regroup."""
        self.signed = signed

    def see(self, head: Head, back_s: float) -> None:
        """`head` is now the last. Of what was seen before, forget what is more than `back_s` seconds older."""
        self.seen = self._with(head, back_s)

    def _with(self, head: Head, back_s: float) -> SeenHead:
        return (self.seen or SeenHead(head)).then(head, time.time(), back_s)

    def saw(self, head: bytes) -> bool:
        """Whether the head of that hash was committed within the time that is remembered."""
        return self.seen is not None and head in self.seen.heads

    def knew(self, peer: str) -> bool:
        """Whether that peer was a member within that time."""
        return self.seen is not None and peer in self.seen.members


class FileState(DurableState):
    """In `home`; each change is on disk before it counts. CheckpointError if what is there cannot be read: guessing
    could fork the run."""

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
    """Both, without what is older than `since`, and of more than `most` the latest."""
    kept = {name: at for name, at in old.items() if at >= since and name not in new} | new
    return dict(list(kept.items())[-most:])


def _read(path: Path, kind: type[Stored]) -> Stored | None:
    if not path.exists():
        return None
    try:
        if path.stat().st_size > FILE_BYTES_MAX:
            raise CheckpointError(f"{path} is too large to be what a coordinator wrote: restore it from a backup.")
        return msgspec.msgpack.decode(path.read_bytes(), type=kind)
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{path} is damaged ({error}): restore it from a backup.") from error
