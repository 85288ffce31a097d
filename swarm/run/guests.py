"""Members by the invite that admitted them: each invite has a limited number of places.

A key takes a place when it has proved itself to this peer (`run.prove`), not with `run.enter`, and not by a record that
it signs: of keys that only sign records, at most as many count at a time as an invite has places left.

A place lapses an hour after the last sign of life of its key, and the places of one address prefix are capped, so one
holder of an invite for many does not fill it from one machine.

Every member counts by itself the members that it has met. So two that come by the last free place of an invite at the
same moment may each be admitted by other members, until one of them is in a head: then all admit it (`swarm.run.gate`).
The coordinator can withdraw the invite, which names those that stay.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Final

import msgspec

from peer.decoding import MALFORMED, told
from peer.errors import CheckpointError, NotAdmitted
from peer.files import read_bounded, write_atomically
from swarm.run.ban_list import Key
from swarm.run.credentials import Link, Rights

PER_PREFIX: Final = 8  # places of one invite, unless [run] members_per_prefix says otherwise
RECORDED_S: Final = 60.0  # a key that signs records only counts for so long after the last one
LAPSE_S: Final = 3600.0  # a place is free again when its key has not been heard of for so long
FORGET_S: Final = 30 * 86400.0  # till then a new invite names a key with a lapsed place among those that it drops
_HEARD_EVERY_S: Final = 600.0  # so often at most a key that stays is noted again, on disk
_FILE_BYTES_MAX: Final = 16 << 20


class GuestPlace(msgspec.Struct, frozen=True, array_like=True):
    """A member's address prefix when it took its place, and the time of its last sign of life."""

    prefix: Annotated[str, msgspec.Meta(max_length=64)]
    """Of its address."""
    heard_at: Annotated[float, msgspec.Meta(ge=0, lt=1 << 40)]


class GuestBook:
    """The members met so far under each key that vouches for them, kept at `path` (None: in memory). Times are Unix
    seconds.

    Raises CheckpointError if the file is damaged.
    """

    def __init__(self, path: Path | None = None) -> None:
        self.per_prefix = PER_PREFIX
        """How many places of one invite an address prefix takes."""
        self._path = path
        self._guests: dict[bytes, dict[bytes, GuestPlace]] = {} if path is None else _load(path)
        self._recorded: dict[bytes, dict[bytes, float]] = {}

    def check(self, admission: Rights, prefix: str, now: float) -> None:
        """Raise NotAdmitted if a key above this member, seen at an address of that prefix, has brought in as many as it
        may, or as many of that prefix. Takes no place."""
        for link in self._lacking(admission, now):
            placed = self._placed(link.key, now)
            if len(placed) >= link.guests:
                raise _full(link)
            if sum(place.prefix == prefix for place in placed.values()) >= self.per_prefix:
                raise NotAdmitted(
                    f"the invite has brought in {self.per_prefix} peers of the address prefix {prefix}, as many as it"
                    " may: ask for another invite, or the owner of the run for a higher [run] members_per_prefix"
                )

    def enter(self, admission: Rights, prefix: str, now: float) -> None:
        """Give a member that has proved itself its place, whether there is room or not."""
        if admission.member is not None:
            self._note(admission.member, admission.sponsors, prefix, now)

    def record(self, admission: Rights, now: float) -> None:
        """Note that a record of this member has come. Raises NotAdmitted if it is not to be believed: the member has no
        place, and the records of other keys fill those that are left. Takes no place."""
        lacking = self._lacking(admission, now)
        for link in lacking:
            placed = self._placed(link.key, now)
            recent = {key: at for key, at in self._recorded.get(link.key, {}).items() if now - at < RECORDED_S}
            self._recorded[link.key] = {key: at for key, at in recent.items() if key not in placed}
            recorded = self._recorded[link.key].keys() | placed.keys()
            if admission.member not in recorded and len(recorded) >= link.guests:
                raise _full(link)
        member = admission.member
        if member is not None:
            for link in lacking:
                self._recorded[link.key][member] = now
            self._note(member, [link for link in admission.sponsors if link not in lacking], None, now)

    def guests(self, key: bytes) -> frozenset[bytes]:
        """Return the public keys of the members met under a key, those whose places have lapsed too."""
        return frozenset(self._guests.get(key, ()))

    @property
    def sponsors(self) -> frozenset[bytes]:
        """The keys under which a member was met."""
        return frozenset(self._guests)

    def _placed(self, key: bytes, now: float) -> dict[bytes, GuestPlace]:
        places = self._guests.get(key, {})
        return {member: place for member, place in places.items() if now - place.heard_at < LAPSE_S}

    def _lacking(self, admission: Rights, now: float) -> list[Link]:
        """Return the keys under which this member has no place now."""
        member = admission.member
        if member is None:
            return []
        places = [(link, self._guests.get(link.key, {}).get(member)) for link in admission.sponsors]
        return [link for link, place in places if place is None or now - place.heard_at >= LAPSE_S]

    def _note(self, member: bytes, sponsors: Iterable[Link], prefix: str | None, now: float) -> None:
        """Note a member's sign of life. `prefix`: None for the one before."""
        changed = False
        for link in sponsors:
            places = self._guests.setdefault(link.key, {})
            known = places.get(member)
            if known is not None and 0 <= now - known.heard_at < _HEARD_EVERY_S:
                continue
            where = prefix if prefix is not None else known.prefix if known is not None else ""
            places[member] = GuestPlace(where, now)
            kept = {other: place for other, place in places.items() if now - place.heard_at < FORGET_S}
            self._guests[link.key] = kept
            changed = True
        if changed and self._path is not None:
            write_atomically(self._path, msgspec.msgpack.encode(self._guests))


def _full(link: Link) -> NotAdmitted:
    return NotAdmitted(
        f"the invite has brought in {link.guests} peers, as many as it may:"
        " ask the peer that invited you for a new invite"
    )


def _load(path: Path) -> dict[bytes, dict[bytes, GuestPlace]]:
    try:
        return msgspec.msgpack.decode(read_bounded(path, _FILE_BYTES_MAX), type=dict[Key, dict[Key, GuestPlace]])
    except FileNotFoundError:
        return {}
    except (OSError, *MALFORMED) as error:
        raise CheckpointError(f"{path} is damaged ({told(error)}): delete it, it is made again") from error
