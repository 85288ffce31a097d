"""The records of one store: by (digest, signer), each until it expires. Pure: time is an argument.

Identities cost nothing, so room is given by trust, then by the address prefix of the connection that stored a record,
then by how long its signer is known here:

- a signer has one slot a key, at most `records_per_signer` slots and `bytes_per_signer` bytes;
- a key keeps at most `records_per_key` records, and `bytes_per_key` bytes of strangers, which is all that a reader gets
  of them. One public prefix has at most `prefix_records_per_key` and `prefix_bytes_per_key` of that;
- the strangers of one public prefix have at most `prefix_records` and `prefix_bytes` in the whole store. Private
  prefixes (loopback, a LAN) have no share of their own: there honest peers live side by side;
- what is over a limit evicts a stranger's record, never a trusted peer's. Of the most crowded prefix concerned, the
  half that is known longest stays; of the rest one goes whose signer is connected no more, the one refreshed longest
  ago. So a newcomer always gets in and stays while it is connected, a flood of identities evicts itself, and a peer
  that refreshes its record is never refused for the key's size.
  Only in a full store does a signer that already holds more than the others have to do without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final

from dht.origin import Origin
from dht.records import Record, StaleRecord, StoreFull

SWEEP_INTERVAL_S: Final = 1.0
CHOICE_MAX: Final = 256  # records of a full store among which one is chosen to go: those refreshed longest ago


@dataclass(frozen=True)
class StorageLimits:
    """Caps of one store. Bytes are counted by `Record.size_bytes`."""

    records: int = 20_000
    size_bytes: int = 32 << 20
    records_per_key: int = 1024
    bytes_per_key: int = 64 << 10
    """Of strangers. Trusted peers' records are bounded by their number and the schema."""
    prefix_records_per_key: int = 4
    prefix_bytes_per_key: int = 16 << 10
    prefix_records: int = 256
    prefix_bytes: int = 256 << 10
    records_per_signer: int = 64
    bytes_per_signer: int = 256 << 10


DEFAULT_LIMITS: Final = StorageLimits()


@dataclass(frozen=True)
class Stored:
    """A record, the monotonic time at which it expires, and what decides how long it may stay."""

    record: Record
    expires_at: float
    origin: Origin
    known_since: float
    """When its signer first stored under this key, without a gap since."""
    refreshed_at: float


@dataclass
class _Usage:
    """The records that one signer, or the strangers of one prefix, hold."""

    size_bytes: int = 0
    slots: dict[tuple[bytes, str], None] = field(default_factory=dict)  # refreshed longest ago first

    def grow(self, stored: Stored) -> None:
        self.size_bytes += stored.record.size_bytes
        self.slots[stored.record.digest, stored.record.signer] = None

    def shrink(self, stored: Stored) -> None:
        self.size_bytes -= stored.record.size_bytes
        self.slots.pop((stored.record.digest, stored.record.signer), None)


class Storage:
    """Checked records under caps. All times are seconds of one monotonic clock."""

    def __init__(
        self, limits: StorageLimits = DEFAULT_LIMITS, is_here: Callable[[str], bool] = lambda signer: True
    ) -> None:
        """`is_here` says whether a signer is connected to us."""
        self._limits = limits
        self._is_here = is_here
        self._slots: dict[bytes, dict[str, Stored]] = {}
        self._signers: dict[str, _Usage] = {}
        self._prefixes: dict[str, _Usage] = {}  # of strangers
        self._editions: dict[bytes, int] = {}  # the number of the latest change, of each digest that holds records
        self._changes = 0
        self._records = 0
        self._size_bytes = 0
        self._next_sweep = 0.0

    def __len__(self) -> int:
        return self._records

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def put(self, record: Record, now: float, origin: Origin = Origin()) -> None:  # noqa: B008 - it is frozen
        """Keep a record for its time to live from now on. The newest of a signer wins; the same one again is a no-op.

        Raises StaleRecord or StoreFull. Then only expired and evicted slots have changed.
        """
        if now >= self._next_sweep:
            self.sweep(now)
        held = self._held(record.digest, record.signer, now)
        if held is not None:
            newest_us = held.record.body.issued_us
            if record.signed == held.record.signed:
                return
            if record.body.issued_us <= newest_us:
                raise StaleRecord(f"a newer record of {record.signer} is held: set that machine's clock", newest_us)
        known_since = now if held is None else held.known_since
        stored = Stored(record, now + record.ttl_s, origin, known_since, now)
        self._check_share(record, held)
        self._drop(record.digest, record.signer)
        try:
            self._make_room_in_key(stored, now)
            if origin.crowd is not None:
                self._make_room_in_prefix(stored)
            self._make_room(stored, now)
        except StoreFull:
            if held is not None:
                self._keep(held)
            raise
        self._keep(stored)

    def get(self, digest: bytes, now: float) -> list[Stored]:
        """Return the records under a digest that have not expired, those of trusted peers first."""
        alive = [stored for stored in self._slots.get(digest, {}).values() if stored.expires_at > now]
        return sorted(alive, key=lambda stored: not stored.origin.trusted)

    def edition(self, digest: bytes) -> int:
        """Return a number that no other content of this digest has had, 0 if it holds no records."""
        return self._editions.get(digest, 0)

    def drop_signer(self, signer: str) -> None:
        """Forget all records of a signer that said goodbye."""
        usage = self._signers.get(signer)
        for digest, _ in tuple(usage.slots) if usage else ():
            self._drop(digest, signer)

    def sweep(self, now: float) -> None:
        """Drop expired records; `put` does so once a second."""
        self._next_sweep = now + SWEEP_INTERVAL_S
        over = [
            (digest, signer)
            for digest, slots in self._slots.items()
            for signer, stored in slots.items()
            if stored.expires_at <= now
        ]
        for digest, signer in over:
            self._drop(digest, signer)

    def _held(self, digest: bytes, signer: str, now: float) -> Stored | None:
        stored = self._slots.get(digest, {}).get(signer)
        if stored is not None and stored.expires_at <= now:
            self._drop(digest, signer)
            return None
        return stored

    def _check_share(self, record: Record, held: Stored | None) -> None:
        usage = self._signers.get(record.signer, _Usage())
        slots = len(usage.slots) + (held is None)
        size_bytes = usage.size_bytes + record.size_bytes - (held.record.size_bytes if held else 0)
        if slots > self._limits.records_per_signer:
            raise StoreFull(f"{record.signer} holds {len(usage.slots)} records here: publish under fewer keys")
        if size_bytes > self._limits.bytes_per_signer:
            raise StoreFull(f"{record.signer} holds {usage.size_bytes} bytes here: publish less")

    def _make_room_in_key(self, new: Stored, now: float) -> None:
        limits, slots = self._limits, self._slots.get(new.record.digest, {})
        if not new.origin.trusted:
            strangers = [stored for stored in slots.values() if not stored.origin.trusted]
            if new.origin.crowd is not None:
                alike = [stored for stored in strangers if stored.origin.prefix == new.origin.prefix]
                self._evict_down_to(alike, new, limits.prefix_records_per_key, limits.prefix_bytes_per_key)
            strangers = [stored for stored in strangers if stored.record.signer in slots]
            self._evict_down_to(strangers, new, limits.records_per_key, limits.bytes_per_key)
        if len(slots) >= limits.records_per_key:
            if all(stored.origin.trusted for stored in slots.values()):
                raise StoreFull(f"the key holds {len(slots)} records already: try again when some have expired")
            self._evict(stored for stored in slots.values() if not stored.origin.trusted)

    def _evict_down_to(self, rivals: list[Stored], new: Stored, records: int, size_bytes: int) -> None:
        """Evict rivals of a new record until there is room for it beside them."""
        held = sum(stored.record.size_bytes for stored in rivals)
        while rivals and (len(rivals) >= records or held + new.record.size_bytes > size_bytes):
            victim = self._evict(rivals)
            held -= victim.record.size_bytes
            rivals.remove(victim)

    def _make_room_in_prefix(self, new: Stored) -> None:
        usage = self._prefixes.get(new.origin.prefix, _Usage())
        while usage.slots and (
            len(usage.slots) >= self._limits.prefix_records
            or usage.size_bytes + new.record.size_bytes > self._limits.prefix_bytes
        ):
            self._evict_unless_greedy(usage, new)

    def _make_room(self, new: Stored, now: float) -> None:
        if self._fits(new):
            return
        self.sweep(now)
        while not self._fits(new):
            crowded = max(self._prefixes.values(), key=lambda usage: usage.size_bytes, default=None)
            if crowded is None:
                raise StoreFull("the store is full of records of trusted peers: try another store")
            if new.origin.trusted:
                self._evict(self._of(crowded))
            else:
                self._evict_unless_greedy(crowded, new)

    def _evict_unless_greedy(self, crowd: _Usage, new: Stored) -> None:
        """Evict a record of a signer that holds more than the new one's would, or of any if it has nothing yet."""
        own = self._signers.get(new.record.signer, _Usage()).size_bytes
        heavy = [
            stored
            for stored in self._of(crowd)
            if self._signers[stored.record.signer].size_bytes > own + new.record.size_bytes
        ]
        if own and not heavy:
            raise StoreFull(f"the store is full and {new.record.signer} holds its share: publish under fewer keys")
        self._evict(heavy or self._of(crowd))

    def _of(self, usage: _Usage) -> list[Stored]:
        return [self._slots[digest][signer] for digest, signer in islice(usage.slots, CHOICE_MAX)]

    def _evict(self, rivals: Iterable[Stored]) -> Stored:
        """Drop a rival of the prefix that holds most among them: of the half that is known for the shortest time, one
        whose signer is gone, refreshed longest ago."""
        by_prefix: dict[str, list[Stored]] = {}
        for stored in rivals:
            by_prefix.setdefault(stored.origin.prefix, []).append(stored)
        crowd = max(by_prefix.values(), key=lambda crowd: sum(stored.record.size_bytes for stored in crowd))
        by_age = sorted(crowd, key=lambda stored: stored.known_since)
        latest = by_age[len(by_age) // 2 :]
        victim = min(latest, key=lambda stored: (self._is_here(stored.record.signer), stored.refreshed_at))
        self._drop(victim.record.digest, victim.record.signer)
        return victim

    def _fits(self, new: Stored) -> bool:
        return (
            self._records < self._limits.records and self._size_bytes + new.record.size_bytes <= self._limits.size_bytes
        )

    def _keep(self, stored: Stored) -> None:
        record = stored.record
        self._slots.setdefault(record.digest, {})[record.signer] = stored
        self._change(record.digest)
        self._signers.setdefault(record.signer, _Usage()).grow(stored)
        if not stored.origin.trusted:
            self._prefixes.setdefault(stored.origin.prefix, _Usage()).grow(stored)
        self._records += 1
        self._size_bytes += record.size_bytes

    def _drop(self, digest: bytes, signer: str) -> None:
        slots = self._slots.get(digest, {})
        stored = slots.pop(signer, None)
        if stored is None:
            return
        for name, usages in ((signer, self._signers), (stored.origin.prefix, self._prefixes)):
            usage = usages.get(name)
            if usage is None or (usages is self._prefixes and stored.origin.trusted):
                continue
            usage.shrink(stored)
            if not usage.slots:
                del usages[name]
        self._change(digest)
        if not slots:
            del self._slots[digest], self._editions[digest]
        self._records -= 1
        self._size_bytes -= stored.record.size_bytes

    def _change(self, digest: bytes) -> None:
        self._changes += 1
        self._editions[digest] = self._changes
