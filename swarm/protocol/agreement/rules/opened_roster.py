"""A roster that a node has checked, and what follows from it. The driver merges and builds by it as it is."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from peer.identity import Signed
from swarm.protocol.agreement.messages import ResultsBody
from swarm.protocol.head import Head, Member
from swarm.protocol.plan import Contribution, WorkPlan


@dataclass(frozen=True)
class OpenedRoster:
    """A checked roster and all that follows from it."""

    key: bytes
    """The hash of the signed roster: the name of its exchange."""
    attempt: int
    signed_plan: Signed
    signed: Signed
    plan: WorkPlan
    contributions: tuple[Contribution, ...]
    weights: tuple[float, ...]
    owners: tuple[Member, ...]
    """The owner of each slice."""
    next: Head
    """The next head, without its state hash."""
    parts: dict[Member, tuple[int, ...]] = field(default_factory=dict)
    """The slices of each owner, in order of the first slice."""
    left_out: tuple[Member, ...] = ()
    """Members for which the roster had no room (`RosterRoom.left_out`)."""
    size: int = 0
    """Bytes of the signed contributions."""

    @property
    def merged(self) -> list[Contribution]:
        """The contributions that are merged, in order."""
        return [body for body, weight in zip(self.contributions, self.weights, strict=True) if weight > 0]

    def hashes(self, results: Mapping[Member, ResultsBody]) -> tuple[bytes, ...] | None:
        """Return the hash of each slice's result; None if an owner's are missing."""
        found: dict[int, bytes] = {}
        for owner, indexes in self.parts.items():
            if owner not in results:
                return None
            found.update(zip(indexes, results[owner].hashes, strict=True))
        return tuple(found[index] for index in range(len(self.owners)))

    def leads_to(self, value: Head) -> bool:
        """Return whether a proposed head follows from this roster. Every voter builds its state hash itself."""
        return value == msgspec.structs.replace(self.next, state_hash=value.state_hash) and len(value.state_hash) == 32
