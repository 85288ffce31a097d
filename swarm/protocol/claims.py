"""Claims of the replicas of a synchronous pipeline about counted samples, checked against their submissions.

A batch seems complete by claims. If a contribution holds less than its peer has claimed, every plan would fail alike:
so that peer must forget its samples, and one that repeatedly claims falsely is no longer asked.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import Final

from swarm.protocol.head import Member
from swarm.protocol.ledger import Range, contains
from swarm.protocol.plan import Contribution, WorkPlan

FALSE_CLAIMS_MAX: Final = 2  # of one peer in a round; from then on its claims are ignored


class Claims:
    """The claims of one round, as one leader sees them."""

    def __init__(self) -> None:
        self._claims: dict[str, tuple[Range, ...]] = {}
        self._false: Counter[str] = Counter()

    @property
    def doubted(self) -> frozenset[str]:
        """Peers whose claims are ignored."""
        return frozenset(peer for peer, times in self._false.items() if times >= FALSE_CLAIMS_MAX)

    def note(self, claims: Mapping[str, Sequence[Range]]) -> None:
        """Note the claims, by peer id, with which a plan's batch seems complete."""
        self._claims = {peer: tuple(ranges) for peer, ranges in claims.items() if peer not in self.doubted}

    def settle(
        self,
        plan: WorkPlan,
        liable: Collection[Member],
        contributions: Mapping[Member, Contribution],
        unusable: Collection[Member],
        disputed: Collection[Member],
    ) -> set[Member]:
        """Compare the claims with the contributions to a plan that has failed, and forget them.

        Return the peers that must forget their counted samples: the `disputed`, which submitted samples that others
        have counted, and members in `liable` that submitted something unusable, or less than they had claimed. A peer
        that was asked to forget may have claimed its samples just before. A peer that asks to join is in the next plan,
        where it must submit what it claims."""
        reset = set(disputed)
        for member in sorted(liable):
            usable, assignment = contributions.get(member), plan.of(member)
            submitted = usable is not None or member in unusable
            told = assignment is not None and assignment.reset
            holds = contains(usable.counted if usable is not None else (), self._claims.get(member.peer, ()))
            if (submitted and usable is None) or not (holds or told):
                self._false[member.peer] += 1
                reset |= {member} if submitted else set()
        inside = {member.peer for member in liable}
        self._false.update(peer for peer, claimed in self._claims.items() if claimed and peer not in inside)
        self._false.update(member.peer for member in disputed)
        self._claims = {}
        return reset
