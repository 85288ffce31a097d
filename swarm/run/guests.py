"""Which members came by which invite: an invite brings in so many and no more.

A key takes a place when it has proved itself here (`run.prove`), not with `run.enter`, and not by a record that it
signs: of keys that only sign records as many are believed at a time as an invite has places left.

Every member counts by itself the members that it has met. So two that come by the last free place of an invite at the
same moment may each be admitted by other members; the coordinator can withdraw the invite, which names those that stay.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from peer.decoding import MALFORMED, told
from peer.errors import CheckpointError, NotAdmitted
from peer.files import read_bounded, write_atomically
from swarm.run.ban_list import Key
from swarm.run.credentials import Link, Rights

RECORDED_S: Final = 60.0  # a key that signs records only counts for so long after the last one
_FILE_BYTES_MAX: Final = 16 << 20


class GuestBook:
    """The members met so far under each key that vouches for them, kept at `path` (None: in memory). Times are Unix
    seconds.

    Raises CheckpointError if the file is damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._guests: dict[bytes, set[bytes]] = {} if path is None else _load(path)
        self._recorded: dict[bytes, dict[bytes, float]] = {}

    def check(self, admission: Rights) -> None:
        """Raise NotAdmitted if a key above this member has brought in as many as it may. Takes no place."""
        for link in self._new(admission):
            if len(self._guests.get(link.key, ())) >= link.guests:
                raise _full(link)

    def enter(self, admission: Rights) -> None:
        """Give a member that has proved itself its place. Raises as `check`."""
        self.check(admission)
        new = self._new(admission)
        for link in new:
            assert admission.member is not None
            self._guests.setdefault(link.key, set()).add(admission.member)
        if new and self._path is not None:
            write_atomically(self._path, msgspec.msgpack.encode(self._guests))

    def record(self, admission: Rights, now: float) -> None:
        """Raise NotAdmitted if a record of this member is not to be believed: it has no place, and the records of other
        keys fill those that are left. Takes no place."""
        new = self._new(admission)
        for link in new:
            placed = self._guests.get(link.key, set())
            recent = {key: at for key, at in self._recorded.get(link.key, {}).items() if now - at < RECORDED_S}
            self._recorded[link.key] = {key: at for key, at in recent.items() if key not in placed}
            recorded = self._recorded[link.key].keys() | placed
            if admission.member not in recorded and len(recorded) >= link.guests:
                raise _full(link)
        for link in new:
            assert admission.member is not None
            self._recorded[link.key][admission.member] = now

    def guests(self, key: bytes) -> frozenset[bytes]:
        """Return the public keys of the members met under a key."""
        return frozenset(self._guests.get(key, ()))

    @property
    def sponsors(self) -> frozenset[bytes]:
        """The keys under which a member was met."""
        return frozenset(self._guests)

    def _new(self, admission: Rights) -> list[Link]:
        """Return the keys under which this member has no place yet."""
        member = admission.member
        return [link for link in admission.sponsors if member is not None and member not in self.guests(link.key)]


def _full(link: Link) -> NotAdmitted:
    return NotAdmitted(
        f"the invite has brought in {link.guests} peers, as many as it may:"
        " ask the peer that invited you for a new invite"
    )


def _load(path: Path) -> dict[bytes, set[bytes]]:
    try:
        return msgspec.msgpack.decode(read_bounded(path, _FILE_BYTES_MAX), type=dict[Key, set[Key]])
    except FileNotFoundError:
        return {}
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{path} is damaged ({told(error)}): delete it, it is made again") from error
