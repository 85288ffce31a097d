"""Which members came by which invite: an invite brings in so many and no more.

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
from swarm.run.credentials import Rights

_FILE_BYTES_MAX: Final = 16 << 20


class GuestBook:
    """The members met so far under each key that vouches for them, kept at `path` (None: in memory).

    Raises CheckpointError if the file is damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self._guests: dict[bytes, set[bytes]] = {} if path is None else _load(path)

    def enter(self, admission: Rights) -> None:
        """Note a member. Raises NotAdmitted if a key above it has brought in as many as it may."""
        member = admission.member
        if member is None:
            return
        new = [link for link in admission.sponsors if member not in self._guests.get(link.key, ())]
        for link in new:
            if len(self._guests.get(link.key, ())) >= link.guests:
                raise NotAdmitted(
                    f"the invite has brought in {link.guests} peers, as many as it may:"
                    " ask the peer that invited you for a new invite"
                )
        for link in new:
            self._guests.setdefault(link.key, set()).add(member)
        if new and self._path is not None:
            write_atomically(self._path, msgspec.msgpack.encode(self._guests))

    def guests(self, key: bytes) -> frozenset[bytes]:
        """Return the public keys of the members met under a key."""
        return frozenset(self._guests.get(key, ()))

    def sponsors(self, member: bytes) -> frozenset[bytes]:
        """Return the keys under which a member was met."""
        return frozenset(key for key, guests in self._guests.items() if member in guests)


def _load(path: Path) -> dict[bytes, set[bytes]]:
    try:
        return msgspec.msgpack.decode(read_bounded(path, _FILE_BYTES_MAX), type=dict[Key, set[Key]])
    except FileNotFoundError:
        return {}
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{path} is damaged ({told(error)}): delete it, it is made again") from error
