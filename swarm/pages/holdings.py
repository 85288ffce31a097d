"""The records of who keeps which pages of the run's data set. They say where to ask; a page is believed by its hash.

A record has a bit for each range of consecutive pages, all of which the peer keeps. A small data set has ranges of one
page.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Final

import msgspec
import numpy as np
import numpy.typing as npt

from dht.records import Schema
from peer.bounds import UnixTime
from peer.net.backoff import Backoff
from swarm.membership.member_record import CREDENTIAL_BYTES_MAX, vouched
from swarm.run.credentials import Chain
from swarm.run.gate import Gate

RANGES_MAX: Final = 2048
_RECORD_BYTES_MAX: Final = 400
DOUBT_S: Final = 10.0  # by then it has published what it gave up
DOUBT_MAX_S: Final = 1800.0

Flags = npt.NDArray[np.uint8]


class HoldingsRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The pages that a peer keeps."""

    at: UnixTime
    """When the record was made."""
    kept: Annotated[bytes, msgspec.Meta(max_length=RANGES_MAX // 8)]
    """A bit for each range, the first one the lowest of the first byte."""
    credential: Chain = ()


def holdings_key(run_id: str) -> str:
    """Return the key of the records of a run."""
    return f"{run_id}/pages"


HOLDINGS: Final = Schema[HoldingsRecord](
    name="pages",
    type=HoldingsRecord,
    ttl_max_s=60.0,
    size_max=_RECORD_BYTES_MAX + CREDENTIAL_BYTES_MAX,
    signer=lambda key, peer: True,
    keys=lambda namespace, key: key == holdings_key(namespace),
)


def holdings_schema(gate: Gate) -> Schema[HoldingsRecord]:
    """Return the schema of the run that `gate` guards."""
    return vouched(HOLDINGS, gate)


@dataclass(frozen=True)
class PageRanges:
    """The cut of a data set's pages into ranges of one length, the last one shorter."""

    pages: int

    @property
    def length(self) -> int:
        """Pages of a range."""
        return -(-self.pages // RANGES_MAX)

    @property
    def count(self) -> int:
        return -(-self.pages // self.length)

    def of(self, page: int) -> int:
        """Return the range that a page is in."""
        return page // self.length

    def pages_of(self, number: int) -> range:
        """Return the pages of a range."""
        return range(number * self.length, min((number + 1) * self.length, self.pages))

    def encode(self, held: Collection[int]) -> bytes:
        """Return the bits of the ranges all of whose pages are held."""
        candidates = range(self.count) if len(held) == self.pages else sorted({self.of(page) for page in held})
        bits = 0
        for number in candidates:
            if all(page in held for page in self.pages_of(number)):
                bits |= 1 << number
        return bits.to_bytes(-(-self.count // 8), "little").rstrip(b"\0")

    def decode(self, kept: bytes) -> Flags:
        """Return whether each range is kept, (count,) of 0 and 1; bits beyond the last range are ignored."""
        whole = kept.ljust(-(-self.count // 8), b"\0")  # of no bytes at all NumPy makes flags of any value
        return np.unpackbits(np.frombuffer(whole, np.uint8), count=self.count, bitorder="little")


@dataclass
class Reputation:
    """What this peer has seen of those whose records say that they keep pages."""

    liars: set[str] = field(default_factory=set)
    """They sent other bytes than they should."""
    doubted: Backoff = field(default_factory=lambda: Backoff(DOUBT_S, DOUBT_MAX_S))
    """They did not give a page that they said they keep, twice in a row: the first one they may just have given up."""

    def believes(self, peer: str) -> bool:
        """Whether a record of this peer counts."""
        return peer not in self.liars and not self.doubted.paused(peer)


@dataclass
class HolderView:
    """Who keeps which ranges, by the records read last."""

    ranges: PageRanges
    kept: dict[str, Flags] = field(default_factory=dict)
    """The ranges that each peer keeps."""
    counts: npt.NDArray[np.int64] = field(init=False)
    """How many peers keep each range."""

    def __post_init__(self) -> None:
        self.learn({})

    def learn(self, records: Mapping[str, HoldingsRecord]) -> None:
        """Take over the records; the ones of before are forgotten."""
        self.kept = {peer: self.ranges.decode(record.kept) for peer, record in records.items()}
        self.counts = np.sum([*self.kept.values()], axis=0, dtype=np.int64) if self.kept else self._none()

    def holders(self, page: int) -> list[str]:
        """Return the peers that keep a page."""
        number = self.ranges.of(page)
        return [peer for peer, flags in self.kept.items() if flags[number]]

    def rare(self, least: int, me: str) -> list[int]:
        """Return the ranges that fewer than `least` peers keep, and `me` does not."""
        mine = self.kept.get(me, self._none())
        return [int(number) for number in np.flatnonzero((self.counts < least) & (mine == 0))]

    def _none(self) -> npt.NDArray[np.int64]:
        return np.zeros(self.ranges.count, np.int64)
