"""What a partner's message may weigh: measured against what this peer itself has seen lately, never against claims.

A delta is compared with our own: NoLoCo's peers train alike. A phi is compared with ours: replicas stay within a few
steps of each other, and the distances of earlier meetings say how far that is.
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
STRAYED_AT: Final = 3  # different partners whose weights were too far away, one after another: then it is us


class Norms:
    """Of one peer. `steps`: H, the most inner steps anybody does in a round."""

    def __init__(self, steps: int) -> None:
        self._steps = steps
        self._own: deque[float] = deque(maxlen=HISTORY)
        self._distances: deque[float] = deque(maxlen=HISTORY)

    def note_own(self, norm: float) -> None:
        """The norm of a delta of ours, one a round."""
        self._own.append(norm)

    def note_met(self, compared: Compared) -> None:
        """A meeting that was taken in."""
        self._distances.append(compared.distance)

    def check(self, compared: Compared, my_steps: int, rounds_apart: int) -> None:
        """Refuse a partner whose delta is more than `BAND` times longer than our longest or shorter than our shortest
        of late, or whose phi is that much longer or shorter than ours: `ProtocolViolation`. The band of delta is wider
        where we did less than H steps, and for each round between us: the learning rate may be warming up. One whose
        phi is further away than others' were is refused without blame, for it may be us who strayed:
        `RoundDiscarded`."""
        if not compared.phi <= BAND * compared.my_phi or compared.phi * BAND < compared.my_phi:
            raise ProtocolViolation("a partner's weights are several times longer or shorter than ours")
        band = BAND * (1 + rounds_apart)
        if self._own and compared.delta > band * max(self._own) * max(1.0, self._steps / max(1, my_steps)):
            raise ProtocolViolation("a partner's delta is several times longer than any of ours")
        if self._own and compared.delta * band * self._steps < min(self._own):  # it may have done a single step
            raise ProtocolViolation("a partner's delta is next to nothing")
        if len(self._distances) >= ENOUGH and self._own:
            usual = max(median_low(self._distances), (1 + rounds_apart) * max(self._own))
            if compared.distance > BAND * usual:
                raise RoundDiscarded("a partner's weights are several times further away than those of others")


class Examiner:
    """Decides for one peer whether a partner's message is taken in; `compared` is that of the last one that was."""

    def __init__(self, coding: PairCoding, steps: int) -> None:
        self.norms = Norms(steps)
        self.compared: Compared | None = None
        self._coding = coding
        self._outgoing: OutgoingUpdate | None = None
        self._steps = 0
        self._far: set[str] = set()

    @property
    def strayed(self) -> bool:
        """Whether it is rather we who went astray."""
        return len(self._far) >= STRAYED_AT

    def begin(self, outgoing: OutgoingUpdate, steps: int) -> None:
        """A round in which we did `steps` steps ourselves."""
        self._outgoing, self._steps, self.compared = outgoing, steps, None

    async def __call__(self, meeting: PairExchange) -> None:
        """Raises as `Norms.check`, or ProtocolViolation for what does not decode."""
        assert self._outgoing is not None and meeting.theirs is not None
        mine = await self._outgoing.message()
        compared = await trio.to_thread.run_sync(self._coding.compare, mine, meeting.theirs)
        try:
            self.norms.check(compared, self._steps, abs(meeting.terms.rounds_apart))
        except RoundDiscarded:
            self._far.add(meeting.terms.partner)
            raise
        self._far.clear()
        self.norms.note_met(compared)
        self.compared = compared
