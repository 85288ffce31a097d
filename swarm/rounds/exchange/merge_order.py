"""What one exchange merges, in the terms of the method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from optim.strategies.interface import Coding, RoundInfo, Sent
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.head import Head
from swarm.rounds.trainers.contribution import as_bytes

_EMPTY: Final = blake3(b"").digest()


class MergeOrder:
    """The contributions of a checked roster, and how they are merged."""

    def __init__(self, roster: OpenedRoster, before: Head, round_info: RoundInfo, coding: Coding) -> None:
        """`before`: the head that the roster follows."""
        self.key, self.before, self.round_info, self.coding = roster.key, before, round_info, coding
        self.merged = roster.merged
        """The contributions that are merged, in order."""
        self.owners = [member.peer for member in roster.owners]
        """The owner (peer id) of each slice."""
        self.parts = roster.parts
        """The slices of each owner."""
        self.peers = [body.member.peer for body in roster.contributions]
        """The contributors (peer ids), in order."""
        self._weights = [weight for weight in roster.weights if weight > 0]

    @property
    def indices(self) -> range:
        """The slices of the update; none where nothing is merged, and the state stays as it is."""
        return range(self.coding.count if self.merged else 0)

    @property
    def empty_results(self) -> tuple[bytes, ...]:
        """The hash of each slice's result where nothing is merged."""
        return (_EMPTY,) * len(self.owners)

    def merge(self, index: int, encoded: Sequence[memoryview]) -> memoryview:
        """Merge the slices of `merged`, in order, and return the encoded result. Raises `ProtocolViolation` if one does
        not decode or the result does not fit the codec."""
        return as_bytes(self.coding.merge(index, encoded, self._weights))

    def sent(self, index: int) -> list[Sent]:
        """Return what goes into one slice's result, in order."""
        return [
            Sent(body.hashes[index], body.sqnorms[index], weight)
            for body, weight in zip(self.merged, self._weights, strict=True)
        ]
