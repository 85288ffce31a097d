"""Bounds on the norms of a partner's update: from this peer's own recent measurements, never from claims.

A delta is compared with this peer's own deltas: NoLoCo's peers train alike. A phi is compared with this peer's phi:
replicas stay within a few steps of each other, and the distances of earlier exchanges show how far that is.
"""

from __future__ import annotations

from collections import deque
from statistics import median_low
from typing import Final

import trio

from peer.errors import ProtocolViolation, RoundDiscarded
from swarm.gossip.coding import Compared, PairCoding
from swarm.gossip.exchange import PairExchange
from swarm.gossip.outgoing import OutgoingUpdate

BAND: Final = 3.0
HISTORY: Final = 16
ENOUGH: Final = 3  # distances before there is a band
STRAYED_AT: Final = 3  # different partners in a row whose weights were too far away: then this peer has strayed


class NormHistory:
    """The norms that one peer has seen recently. `steps`: H, the most inner steps of a round."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self.own: deque[float] = deque(maxlen=HISTORY)
        """Of this peer's own deltas, one a round."""
        self.distances: deque[float] = deque(maxlen=HISTORY)
        """Of the exchanges whose updates were accepted."""

    def check(self, compared: Compared, my_steps: int, rounds_apart: int) -> None:
        """Check a partner's update.

        Raises ProtocolViolation if its delta is more than `BAND` times longer than this peer's longest or shorter than
        its shortest of late, or its phi that much longer or shorter than this peer's. The band of delta is wider where
        this peer did less than H steps, and for each round between the two: the learning rate may be warming up.
        Raises RoundDiscarded, which is no violation, if its phi is further away than others' were: this peer may have
        strayed.
        """
        if not compared.phi <= BAND * compared.my_phi or compared.phi * BAND < compared.my_phi:
            raise ProtocolViolation("the norm of the partner's weights is several times too large or too small")
        band = BAND * (1 + rounds_apart)
        if self.own and compared.delta > band * max(self.own) * max(1.0, self._steps / max(1, my_steps)):
            raise ProtocolViolation("the norm of the partner's delta is several times too large")
        if self.own and compared.delta * band * self._steps < min(self.own):  # it may have done one step
            raise ProtocolViolation("the norm of the partner's delta is next to zero")
        if len(self.distances) >= ENOUGH and self.own:
            usual = max(median_low(self.distances), (1 + rounds_apart) * max(self.own))
            if compared.distance > BAND * usual:
                raise RoundDiscarded("the partner's weights are several times further away than earlier partners' were")


class NormCheck:
    """Decides for one peer whether a partner's update is accepted; `compared` is of the last one that was."""

    def __init__(self, coding: PairCoding, steps: int) -> None:
        self.norms = NormHistory(steps)
        self.compared: Compared | None = None
        self._coding = coding
        self._outgoing: OutgoingUpdate | None = None
        self._steps = 0
        self._far: set[str] = set()

    @property
    def strayed(self) -> bool:
        """Whether this peer's own weights, not its partners', are the ones far away."""
        return len(self._far) >= STRAYED_AT

    def begin(self, outgoing: OutgoingUpdate, steps: int) -> None:
        """Begin a round in which this peer did `steps` inner steps."""
        self._outgoing, self._steps, self.compared = outgoing, steps, None

    async def __call__(self, exchange: PairExchange) -> None:
        """Raises as `NormHistory.check`, or ProtocolViolation for what does not decode."""
        assert self._outgoing is not None and exchange.theirs is not None
        mine = await self._outgoing.message()
        compared = await trio.to_thread.run_sync(self._coding.compare, mine, exchange.theirs)
        try:
            self.norms.check(compared, self._steps, abs(exchange.terms.rounds_apart))
        except RoundDiscarded:
            self._far.add(exchange.terms.partner)
            raise
        self._far.clear()
        self.norms.distances.append(compared.distance)
        self.compared = compared
