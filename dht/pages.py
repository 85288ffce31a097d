"""The records of a key as a fetch returns them: in pages, encoded once a change and shared by all that ask.

So calls whose replies are never read hold one copy of a key, whatever their number. An edition is one encoding of a
key. A reader that has begun with an edition gets its other pages as long as it is kept, else those of a later one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

import msgspec

from dht.protocol import PAGE_BYTES, PAGES_MAX, FetchReply, HeldRecord
from dht.storage import Storage, Stored
from peer.decoding import MALFORMED, told
from peer.errors import ProtocolViolation
from peer.net.rpc import Buffer

FRAMING_BYTES_MAX: Final = 64  # of a record in a page
KEPT_BYTES_MAX: Final = 4 << 20
EDITIONS_MAX: Final = 256

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[HeldRecord])
_NO_RECORDS: Final = _encoder.encode([])


@dataclass(frozen=True)
class _Edition:
    encoded_at: float
    pages: tuple[bytes, ...]

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self.pages))


class RecordPages:
    """The pages of one store: the latest editions, `KEPT_BYTES_MAX` at most. Times are those of the store."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._kept: OrderedDict[tuple[bytes, int], _Edition] = OrderedDict()  # asked for longest ago first
        self._size_bytes = 0

    @property
    def size_bytes(self) -> int:
        return self._size_bytes

    def page(self, digest: bytes, number: int, edition: int, now: float, clock_s: float) -> tuple[FetchReply, bytes]:
        """Return one page of a key: of the latest edition if it is the first, or if `edition` is not kept any more."""
        latest = self._storage.edition(digest)
        if number == 0 or (digest, edition) not in self._kept:
            edition = latest
        if not edition:
            return FetchReply(clock_s), _NO_RECORDS
        kept = self._kept.get((digest, edition))
        if kept is None:
            kept = self._encode(digest, edition, now)
        self._kept.move_to_end((digest, edition))
        payload = kept.pages[number] if number < len(kept.pages) else _NO_RECORDS
        return FetchReply(clock_s, len(kept.pages), edition, now - kept.encoded_at), payload

    def _encode(self, digest: bytes, edition: int, now: float) -> _Edition:
        pages = tuple(_encoder.encode(page) for page in _split(self._storage.get(digest, now), now))
        encoded = self._kept[digest, edition] = _Edition(now, pages)
        self._size_bytes += encoded.size_bytes
        while len(self._kept) > 1 and (self._size_bytes > KEPT_BYTES_MAX or len(self._kept) > EDITIONS_MAX):
            _, dropped = self._kept.popitem(last=False)
            self._size_bytes -= dropped.size_bytes
        return encoded


def _split(stored: Iterable[Stored], now: float) -> list[list[HeldRecord]]:
    """Return the records of each page, with the time that is left for each."""
    pages, room = list[list[HeldRecord]]([[]]), PAGE_BYTES - FRAMING_BYTES_MAX
    for item in stored:
        size = item.record.size_bytes + FRAMING_BYTES_MAX
        if size > room:
            if len(pages) == PAGES_MAX:
                break
            pages.append([])
            room = PAGE_BYTES - FRAMING_BYTES_MAX
        room -= size
        pages[-1].append(HeldRecord(item.record.signed, item.expires_at - now))
    return pages


def decode_page(payload: Buffer) -> list[HeldRecord]:
    """Return the records of a page. Raises ProtocolViolation."""
    try:
        return _decoder.decode(payload)
    except MALFORMED as error:
        raise ProtocolViolation(f"records that do not decode: {told(error)}") from error
