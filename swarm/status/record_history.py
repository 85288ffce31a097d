"""What the records of several readings add up to: bytes a second, the names that peers have claimed, losses a round."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from statistics import median_high
from typing import Final

from swarm.inference.record import ServerRecord
from swarm.membership.member_record import MemberRecord

NAMES_MAX: Final = 1024
ROUNDS_MAX: Final = 256
AHEAD_MAX: Final = ROUNDS_MAX // 4
"""Rounds by which a peer can be ahead of half of the others, where they gossip."""
PEERS_MAX: Final = 128
"""Losses of one round."""


Rate = tuple[float, float]
"""Bytes a second, up and down."""


def last_round(records: Mapping[str, MemberRecord], proved: Iterable[int], gossip: bool) -> int:
    """Return the last round at which a peer can be: that after the last proved one. In gossip none is proved; there it
    is one that half of the peers are near."""
    if not gossip:
        return max(proved, default=-1) + 1
    return int(median_high([record.round for record in records.values()] or [0])) + AHEAD_MAX


class RecordHistory:
    """Claims of peers, over time."""

    def __init__(self) -> None:
        self.rates: dict[str, Rate] = {}
        """Between a peer's last two records."""
        self.names: dict[str, str] = {}
        self.losses: dict[int, dict[str, float]] = {}
        """The last training loss of each peer at each round."""
        self._last: dict[str, tuple[float, int, int]] = {}

    def note(self, records: Mapping[str, MemberRecord | ServerRecord]) -> None:
        """Take the records of one reading."""
        self._last = {peer: last for peer, last in self._last.items() if peer in records}
        self.rates = {peer: rate for peer, rate in self.rates.items() if peer in records}
        for peer, record in records.items():
            at, up, down = self._last.get(peer, (record.at, record.bytes_up, record.bytes_down))
            if (seconds := record.at - at) > 0:
                more_up, more_down = max(0, record.bytes_up - up), max(0, record.bytes_down - down)
                self.rates[peer] = (more_up / seconds, more_down / seconds)
            self._last[peer] = (record.at, record.bytes_up, record.bytes_down)
            self.names.pop(peer, None)
            self.names[peer] = record.name
        for peer in list(self.names)[: max(0, len(self.names) - NAMES_MAX)]:
            del self.names[peer]

    def note_losses(self, records: Mapping[str, MemberRecord], last: int) -> None:
        """Take the losses of a run's members, of rounds up to `last`: invented ones must not displace others."""
        for peer, record in records.items():
            if record.loss is None or not 1 <= record.round <= last:
                continue
            of_round = self.losses.setdefault(record.round, {})
            if peer in of_round or len(of_round) < PEERS_MAX:
                of_round[peer] = record.loss
        for number in sorted(self.losses)[: max(0, len(self.losses) - ROUNDS_MAX)]:
            del self.losses[number]
