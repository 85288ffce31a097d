"""A merge order: what one exchange merges, in the terms of the method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from optim.bundles import Bundles
from optim.strategies.interface import Coding, RoundInfo, Sent
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.head import Head
from swarm.rounds.trainers.contribution import as_bytes

_EMPTY: Final = blake3(b"").digest()


class MergeOrder:
    """The contributions of a checked roster, and how they are merged."""

    def __init__(
        self, roster: OpenedRoster, before: Head, round_info: RoundInfo, coding: Coding, bundles: Bundles
    ) -> None:
        """`before`: the head that the roster follows; `bundles`: of the coding's slices, which is what a roster has
        owners of."""
        self.key, self.before, self.round_info, self.coding = roster.key, before, round_info, coding
        self.bundles = bundles
        self.merged = roster.merged
        """The contributions that are merged, in order."""
        self.owners = [roster.owners[bundles.of(index)].peer for index in range(bundles.slices)]
        """The owner (peer id) of each slice."""
        self.parts = {
            owner: tuple(index for bundle in owned for index in bundles.indices(bundle))
            for owner, owned in roster.parts.items()
        }
        """The slices of each owner."""
        self.peers = [body.member.peer for body in roster.contributions]
        """The contributors (peer ids), in order."""
        self._weights = [weight for weight in roster.weights if weight > 0]

    @property
    def indices(self) -> range:
        """The slices of the update; none where nothing is merged, and the state stays as it is."""
        return range(self.coding.count if self.merged else 0)

    @property
    def filled(self) -> range:
        """The bundles of the update; none where nothing is merged."""
        return range(self.bundles.count if self.merged else 0)

    @property
    def empty_results(self) -> tuple[bytes, ...]:
        """The hash of each bundle's result where nothing is merged."""
        return (_EMPTY,) * self.bundles.count

    def merge(self, index: int, encoded: Sequence[memoryview]) -> memoryview:
        """Merge the slices of `merged`, in order, and return the encoded result. Raises `ProtocolViolation` if one does
        not decode or the result does not fit the codec."""
        return as_bytes(self.coding.merge(index, encoded, self._weights))

    def check(self, bundle: int, results: Sequence[memoryview]) -> None:
        """Raise `ProtocolViolation` if the results of a bundle's slices do not decode or cannot be the merge of what
        was committed to."""
        sent = [
            Sent(body.hashes[bundle], body.sqnorms[bundle], weight)
            for body, weight in zip(self.merged, self._weights, strict=True)
        ]
        self.coding.check_result(self.bundles.indices(bundle), results, sent)
