"""The records of one store: by (digest, signer), each until it expires. Pure: time is an argument.

Bounded against floods, by these rules:
- a signer has one slot per key, at most `records_per_signer` slots and `bytes_per_signer` bytes;
- a key has at most `records_per_key` slots and `bytes_per_key` bytes, so that one reply can carry them all. A full key
  refuses new signers and still takes refreshes;
- when the whole store is full, the signer with the most bytes loses its slot nearest to expiry, if it holds more than
  the newcomer would and more than `bytes_guaranteed`. Otherwise the newcomer is refused. So an identity that floods
  loses only its own records, and many identities with one slot each can fill the store but evict no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from dht.records import Record, StaleRecord, StoreFull

SWEEP_INTERVAL_S: Final = 1.0


@dataclass(frozen=True)
class StorageLimits:
    """Caps of one store. Bytes are counted by `Record.size_bytes`."""

    records: int = 20_000
    size_bytes: int = 32 << 20
    records_per_key: int = 1024
    bytes_per_key: int = 1 << 20
    records_per_signer: int = 64
    bytes_per_signer: int = 256 << 10
    bytes_guaranteed: int = 16 << 10


DEFAULT_LIMITS: Final = StorageLimits()


@dataclass(frozen=True)
class Stored:
    """A record and the monotonic time at which it expires."""

    record: Record
    expires_at: float


@dataclass
class _Usage:
    size_bytes: int = 0
    digests: set[bytes] = field(default_factory=set)


class Storage:
    """Checked records under caps. All times are seconds of one monotonic clock."""

    def __init__(self, limits: StorageLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._slots: dict[bytes, dict[str, Stored]] = {}
        self._key_bytes: dict[bytes, int] = {}
        self._signers: dict[str, _Usage] = {}
        self._records = 0
        self._size_bytes = 0
        self._next_sweep = 0.0

    def __len__(self) -> int:
        return self._records

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def put(self, record: Record, now: float) -> None:
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
        growth = record.size_bytes - (held.record.size_bytes if held else 0)
        self._check_share(record, growth, is_new=held is None)
        self._make_room(record, growth, is_new=held is None, now=now)
        self._drop(record.digest, record.signer)
        self._keep(Stored(record, now + record.ttl_s))

    def get(self, digest: bytes, now: float) -> list[Stored]:
        """Return the records under a digest that have not expired."""
        return [stored for stored in self._slots.get(digest, {}).values() if stored.expires_at > now]

    def drop_signer(self, signer: str) -> None:
        """Forget all records of a signer that said goodbye."""
        usage = self._signers.get(signer)
        for digest in tuple(usage.digests) if usage else ():
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

    def _check_share(self, record: Record, growth: int, *, is_new: bool) -> None:
        usage = self._signers.get(record.signer, _Usage())
        if len(usage.digests) + is_new > self._limits.records_per_signer:
            raise StoreFull(f"{record.signer} holds {len(usage.digests)} records here: publish under fewer keys")
        if usage.size_bytes + growth > self._limits.bytes_per_signer:
            raise StoreFull(f"{record.signer} holds {usage.size_bytes} bytes here: publish less")
        slots = len(self._slots.get(record.digest, {}))
        key_bytes = self._key_bytes.get(record.digest, 0)
        if slots + is_new > self._limits.records_per_key or key_bytes + growth > self._limits.bytes_per_key:
            raise StoreFull(f"the key holds {slots} records already: try again when some have expired")

    def _make_room(self, record: Record, growth: int, *, is_new: bool, now: float) -> None:
        if self._fits(growth, is_new):
            return
        self.sweep(now)
        own = self._signers.get(record.signer, _Usage()).size_bytes + growth
        while not self._fits(growth, is_new):
            hog, usage = max(self._signers.items(), key=lambda item: item[1].size_bytes, default=("", _Usage()))
            if usage.size_bytes <= max(own, self._limits.bytes_guaranteed):
                raise StoreFull("the store is full and no signer holds more than its share: try another store")
            digest = min(usage.digests, key=lambda digest: self._slots[digest][hog].expires_at)
            self._drop(digest, hog)

    def _fits(self, growth: int, is_new: bool) -> bool:
        return self._records + is_new <= self._limits.records and self._size_bytes + growth <= self._limits.size_bytes

    def _keep(self, stored: Stored) -> None:
        record = stored.record
        self._slots.setdefault(record.digest, {})[record.signer] = stored
        self._key_bytes[record.digest] = self._key_bytes.get(record.digest, 0) + record.size_bytes
        usage = self._signers.setdefault(record.signer, _Usage())
        usage.size_bytes += record.size_bytes
        usage.digests.add(record.digest)
        self._records += 1
        self._size_bytes += record.size_bytes

    def _drop(self, digest: bytes, signer: str) -> None:
        slots = self._slots.get(digest, {})
        stored = slots.pop(signer, None)
        if stored is None:
            return
        size_bytes = stored.record.size_bytes
        usage = self._signers[signer]
        usage.size_bytes -= size_bytes
        usage.digests.discard(digest)
        if not usage.digests:
            del self._signers[signer]
        self._key_bytes[digest] -= size_bytes
        if not slots:
            del self._slots[digest], self._key_bytes[digest]
        self._records -= 1
        self._size_bytes -= size_bytes
