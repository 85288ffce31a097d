"""What one exchange merges, in the terms of the method: derived from the plan and roster that the node has checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from blake3 import blake3

from optim.strategies.interface import Coding, RoundInfo, Sent
from peer.identity import Signed, open_body
from swarm.protocol.agreement.messages import RosterBody
from swarm.protocol.agreement.rules.evidence import ROSTER
from swarm.protocol.head import Head
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution
from swarm.rounds.trainers.contribution import as_bytes


@dataclass(frozen=True)
class MergeOrder:
    """The contributions of one roster, and how they are merged."""

    key: bytes
    """The exchange: the hash of the roster."""
    before: Head
    round_info: RoundInfo
    coding: Coding
    bodies: Sequence[Contribution]
    """In the roster's order."""
    weights: Sequence[float]
    """The weight of each; 0 for one that is not merged."""

    @classmethod
    def of(
        cls, roster: Signed, weights: Sequence[float], before: Head, round_info: RoundInfo, coding: Coding
    ) -> MergeOrder:
        """Derive it from a roster. Raises `ProtocolViolation`."""
        opened = open_body(roster, ROSTER, RosterBody)
        bodies = [open_body(signed, CONTRIBUTION_KIND, Contribution) for signed in opened.contributions]
        return cls(blake3(roster.body).digest(), before, round_info, coding, bodies, weights)

    @property
    def merged(self) -> list[Contribution]:
        """The contributions that are merged, in order."""
        return [body for body, weight in zip(self.bodies, self.weights, strict=True) if weight > 0]

    @property
    def peers(self) -> list[str]:
        """The contributors (peer ids), in order."""
        return [body.member.peer for body in self.bodies]

    @property
    def indices(self) -> range:
        """The slices of the update; none where nothing is merged, and the state stays as it is."""
        return range(self.coding.count if self.merged else 0)

    def merge(self, index: int, encoded: Sequence[memoryview]) -> memoryview:
        """Merge the slices of `merged`, in order, and return the encoded result. Raises `ProtocolViolation` if one does
        not decode or the result does not fit the codec."""
        return as_bytes(self.coding.merge(index, encoded, [weight for weight in self.weights if weight > 0]))

    def sent(self, index: int) -> list[Sent]:
        """Return what goes into one slice's result, in order."""
        return [
            Sent(body.hashes[index], body.sqnorms[index], weight)
            for body, weight in zip(self.bodies, self.weights, strict=True)
            if weight > 0
        ]
