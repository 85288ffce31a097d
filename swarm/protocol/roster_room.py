"""Capacity of a roster, and the contributions merged when not all fit, as the leader and each voter find it.

A roster is one message, so it has a bounded size. A run whose largest group has no room in it is not created. Where
long contributions fill a roster all the same, the hash of the head that the round follows draws the order of the
members, so that all take part in turn."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Final

import msgspec
from blake3 import blake3

from peer.bounds import NUMBERS_END
from peer.identity import Signed
from swarm.protocol.head import Head, Member
from swarm.protocol.plan import Contribution
from swarm.protocol.receipts import ReceiptBody

ROSTER_BYTES_MAX: Final = 3 << 18  # of signed contributions; a message of at most 1 MiB holds more than these
NAMED_SHARE: Final = 16  # a part of the roster that one contribution may take for samples and receipts
USUAL_RANGES: Final = 64  # of samples that a contribution to a pipeline names, and its receipts together
USUAL_RECEIPTS: Final = 8

_PEER: Final = "x" * 52  # as long as the id of an Ed25519 peer
_SESSION: Final = "f" * 16
_HASH: Final = bytes(32)
_RANGE: Final = (NUMBERS_END, NUMBERS_END)
_encoded: Final = msgspec.msgpack.encode


def _signed(body: bytes) -> Signed:
    return Signed(body, _PEER, bytes(64))


_SLICE_BYTES: Final = len(_encoded(_HASH)) + len(_encoded(1.0))  # a hash and a squared norm
ENVELOPE_BYTES: Final = len(_encoded(_signed(b""))) + 4  # around a signed body, with a length of five bytes


@lru_cache(maxsize=256)
def usual_bytes(slices: int, pipeline: bool = False) -> int:
    """Return the bytes of a signed contribution with this many slices and its numbers at full length. In a pipeline it
    has `USUAL_RANGES` ranges of samples, and receipts by `USUAL_RECEIPTS` peers for as many: there is no smaller bound
    that always holds."""
    ranges = (_RANGE,) * USUAL_RANGES if pipeline else ()
    receipt = _encoded(_signed(_encoded(ReceiptBody(_HASH, _PEER, ranges[: USUAL_RANGES // USUAL_RECEIPTS]))))
    body = Contribution(
        head=_HASH,
        plan=_HASH,
        member=Member(_PEER, _SESSION),
        steps=NUMBERS_END,
        samples=NUMBERS_END,
        loss=1.0,
        hashes=(),
        sqnorms=(),
        counted=ranges,
        exhausted=True,
    )
    receipts = len(receipt) * USUAL_RECEIPTS if pipeline else 0
    return len(_encoded(body)) + ENVELOPE_BYTES + receipts + 8 + slices * _SLICE_BYTES  # 8: longer lists' lengths


def peers_that_fit(slices: int, pipeline: bool = False, most: int = ROSTER_BYTES_MAX) -> int:
    """Return how many contributions of usual length one roster holds."""
    return most // usual_bytes(slices, pipeline)


@dataclass(frozen=True)
class RosterRoom:
    """The room in a roster of the round after `head`."""

    head: Head
    head_hash: bytes
    slices: int
    """Of an update in that round."""
    most: int = ROSTER_BYTES_MAX

    def fit(self, contributions: Mapping[Member, Signed]) -> list[Member]:
        """Return the members whose contributions go into one roster, in order of member.

        The members come first, then newcomers, each as the head's hash draws them, up to the first that does not fit.
        Contributions with more in them than a usual one's and a sixteenth of a roster come after these, the shortest
        first, so that one that names many scattered ranges cannot crowd out others."""
        sizes = {member: bytes_of(signed) for member, signed in contributions.items()}
        usual = {member for member, size in sizes.items() if size <= self._usual_most}
        members = [member for member in sizes if self.head.has(member)]
        if members and not usual.intersection(members):  # newcomers alone make no roster
            usual.add(min(members, key=lambda member: (sizes[member], member)))
        drawn = sorted(usual, key=lambda member: (not self.head.has(member), self._drawn(member)))
        long = sorted(sizes.keys() - usual, key=lambda member: (sizes[member], member))
        ordered = [*drawn, *long]
        ends = accumulate(sizes[member] for member in ordered)
        return sorted(member for member, end in zip(ordered, ends, strict=True) if end <= self.most)

    def left_out(self, roster: Mapping[Member, Signed], absent: Iterable[Member]) -> tuple[Member, ...]:
        """Return those of the members `absent` from a roster for which it had no room at their turn, if they have
        contributed something of a length that is drawn. One that has not is among them, too, in the rounds in which
        the draw puts it behind those of the roster."""
        if sum(map(bytes_of, roster.values())) + self._usual_most <= self.most:
            return ()
        before = sorted(
            (self._drawn(member), bytes_of(signed))
            for member, signed in roster.items()
            if self.head.has(member) and bytes_of(signed) <= self._usual_most
        )
        ends = [0, *accumulate(size for _, size in before)]
        return tuple(
            member
            for member in sorted(absent)
            if ends[bisect(before, (self._drawn(member), 0))] + self._usual_most > self.most
        )

    @property
    def _usual_most(self) -> int:
        return usual_bytes(self.slices) + self.most // NAMED_SHARE

    def _drawn(self, member: Member) -> bytes:
        return blake3(self.head_hash + _encoded(member)).digest()


def bytes_of(signed: Signed) -> int:
    """Return what a signed contribution takes of a roster."""
    return len(signed.body) + ENVELOPE_BYTES
