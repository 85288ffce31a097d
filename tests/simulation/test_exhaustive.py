"""Every schedule of small ballots, driven through the functions that voters and leaders really use.

A state is what all voters have on disk and all that was ever signed; a step is one promise, proposal or vote.
Losses, delays and crashes need no steps of their own: a message that is lost is one that no step uses. Each search
with a rule switched off must find two histories, so that it could have found them with the rule on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any, NamedTuple

import pytest

from swarm.protocol.agreement.config import Mode
from swarm.protocol.agreement.rules.acceptor import Ballot, forced_value, needs_promises
from swarm.protocol.agreement.rules.electorate import Electorate

STATES_MAX = 300_000
START = b"start"  # the coordinator decides for a start of term
Signatures = frozenset[tuple[int, int, bytes]]  # (voter, attempt, value)


class Reported(NamedTuple):
    attempt: int
    value: bytes


class World(NamedTuple):
    """All disks, and all that was ever signed."""

    ballots: tuple[Ballot, ...]
    proposed: frozenset[tuple[int, bytes]] = frozenset()
    votes: Signatures = frozenset()
    witness: Ballot = Ballot()
    decided: frozenset[bytes] = frozenset()
    """What the required coordinator has let out: certificates, or a start."""
    stands: bool = False
    """Whether that coordinator's disk says that it has decided."""
    restores: int = 0


@dataclass(frozen=True)
class Search:
    """One kind of group. The fields from `forced` on switch rules off."""

    members: int
    attempts: int
    mode: Mode = "witness"
    liars: frozenset[int] = frozenset()
    two_faced: frozenset[int] = frozenset()
    """Attempts whose leader signs two values."""
    restores: int = 0
    """How often a required coordinator's disk is put back to an empty one, unnoticed."""
    starts: bool = False
    forced: Callable[[list[Reported]], Reported | None] = forced_value
    asks: Callable[[int], bool] = needs_promises
    """Whether the leader of an attempt asks for promises."""
    quorum: int = 0
    """Instead of the electorate's, if not 0."""
    forgets: bool = False
    electorate: Electorate = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "electorate", Electorate(self.mode))

    def run(self) -> tuple[int, bool]:
        """Return the number of states, and whether two values can both be chosen."""
        first = World(tuple(Ballot() for _ in range(self.members)))
        seen, todo = {first}, [first]
        while todo:
            world = todo.pop()
            if len(self._chosen(world)) > 1:
                return len(seen), True
            assert len(seen) <= STATES_MAX, "the search is too large: make the group smaller"
            for step in self._steps(world):
                if step not in seen:
                    seen.add(step)
                    todo.append(step)
        return len(seen), False

    # -- the electorate ------------------------------------------------------------------------------------------------

    @property
    def _witness(self) -> int | None:
        """The coordinator as a voter, by the number after the last member's."""
        if self.mode == "required" or (self.members % 2 == 0 and not self.quorum):
            return self.members
        return None

    def _enough(self, voters: set[int]) -> bool:
        if self.quorum:
            return len(voters) >= self.quorum
        return self.electorate.is_quorum(range(self.members), self._witness, voters)

    def _signers(self, signatures: Signatures, attempt: int, value: bytes) -> set[int]:
        return {voter for voter, a, v in signatures if (a, v) == (attempt, value)} | set(self.liars)

    def _chosen(self, world: World) -> set[bytes]:
        if self.mode == "required":
            return set(world.decided)
        return {v for a, v in world.proposed if self._enough(self._signers(world.votes, a, v))}

    def _accepted(self, world: World, voter: int) -> Reported | None:
        ballot = world.witness if voter == self.members else world.ballots[voter]
        return Reported(ballot.voted_attempt, ballot.voted) if ballot.voted_attempt >= 0 else None

    # -- steps ---------------------------------------------------------------------------------------------------------

    def _steps(self, world: World) -> Iterator[World]:
        for attempt in range(self.attempts):
            yield from self._promises(world, attempt)
            yield from self._proposals(world, attempt)
            for value in sorted(v for a, v in world.proposed if a == attempt):
                yield from self._votes(world, attempt, value)
                yield from self._decisions(world, attempt, value)
        if self.forgets:
            for voter in self._honest():
                yield self._with(world, voter, Ballot())
        if self.starts and not world.stands:
            yield world._replace(decided=world.decided | {START}, stands=True)
        if world.restores < self.restores and world.decided:
            yield world._replace(witness=Ballot(), stands=False, restores=world.restores + 1)

    def _honest(self) -> list[int]:
        return [voter for voter in range(self.members) if voter not in self.liars]

    def _voters(self, world: World) -> list[int]:
        """Honest voters that may still promise or vote; a required coordinator votes by deciding."""
        witness = [] if self._witness is None or world.stands else [self._witness]
        return self._honest() + witness

    def _with(self, world: World, voter: int, ballot: Ballot, **changes: Any) -> World:
        if voter == self.members:
            return world._replace(witness=ballot, **changes)
        ballots = tuple(ballot if i == voter else old for i, old in enumerate(world.ballots))
        return world._replace(ballots=ballots, **changes)

    def _ballot(self, world: World, voter: int) -> Ballot:
        return world.witness if voter == self.members else world.ballots[voter]

    def _promises(self, world: World, attempt: int) -> Iterator[World]:
        for voter in self._voters(world):
            ballot = self._ballot(world, voter).promise(attempt)
            if ballot is not None:
                yield self._with(world, voter, ballot)

    def _proposals(self, world: World, attempt: int) -> Iterator[World]:
        """The leader proposes on the promises of any quorum, or in the first attempt without any. A liar among those
        that promise reports nothing, or what evidence supports."""
        made = sum(a == attempt for a, _ in world.proposed)
        if made >= 1 + (attempt in self.two_faced):
            return
        free = [b"%d" % attempt, b"%d'" % attempt][: 1 + (attempt in self.two_faced)]
        if not self.asks(attempt):
            for value in free:
                yield world._replace(proposed=world.proposed | {(attempt, value)})
            return
        ready = [
            voter
            for voter in self._voters(world)
            if (ballot := self._ballot(world, voter)).promised == attempt and ballot.voted_attempt < attempt
        ]
        for size in range(len(ready) + 1):
            for promising in combinations(ready, size):
                if not self._enough({*promising, *self.liars}):
                    continue
                reports = [report for voter in promising if (report := self._accepted(world, voter)) is not None]
                for lie in self._lies(world, attempt, promising):
                    forced = self.forced([*reports, *lie])
                    for value in [forced.value] if forced is not None else free:
                        if (attempt, value) not in world.proposed:
                            yield world._replace(proposed=world.proposed | {(attempt, value)})

    def _lies(self, world: World, attempt: int, promising: tuple[int, ...]) -> Iterator[list[Reported]]:
        yield []
        if self.liars and not self._enough(set(promising)):
            for a, value in sorted(world.proposed):
                if a < attempt:
                    yield [Reported(a, value)]

    def _votes(self, world: World, attempt: int, value: bytes) -> Iterator[World]:
        for voter in self._voters(world):
            if voter == self.members and self.mode == "required":
                continue
            voted = self._ballot(world, voter).vote(attempt, value)
            if voted is not None:
                yield self._with(world, voter, voted, votes=world.votes | {(voter, attempt, value)})

    def _decisions(self, world: World, attempt: int, value: bytes) -> Iterator[World]:
        """The required coordinator votes last and once: its vote is the certificate."""
        if self.mode != "required" or world.stands:
            return
        voters = self._signers(world.votes, attempt, value) - {self.members}
        ballot = world.witness.vote(attempt, value)
        if ballot is not None and self._enough({*voters, self.members}):
            yield world._replace(witness=ballot, decided=world.decided | {value}, stands=True)


def nothing_forced(reports: list[Reported]) -> Reported | None:
    return None


def lowest_forced(reports: list[Reported]) -> Reported | None:
    return min(reports, key=lambda report: report.attempt, default=None)


HOLD = {
    "n=3, 3 attempts": Search(3, 3),
    "n=2 and a witness": Search(2, 3),
    "n=4 and a witness": Search(4, 2),
    "n=5": Search(5, 2),
    "n=3, required": Search(3, 2, mode="required"),
    "n=2, required, start": Search(2, 2, mode="required", starts=True),
    "n=3, required, two-faced leader": Search(3, 2, mode="required", two_faced=frozenset({0, 1})),
    "n=3, required, no phase 1": Search(3, 2, mode="required", forced=nothing_forced),
    "n=2, required, restored unnoticed": Search(2, 3, mode="required", restores=1),
    "n=3, required, restored unnoticed": Search(3, 2, mode="required", restores=1),
}

FORK = {
    "n=4, a bare half": Search(4, 2, quorum=2),
    "n=3, the lowest instead of the highest": Search(3, 3, forced=lowest_forced),
    "n=3, nothing is forced": Search(3, 2, forced=nothing_forced),
    "n=3, no attempt asks for promises": Search(3, 2, asks=lambda attempt: False),
    "n=3, the first attempt is led twice": Search(3, 2, two_faced=frozenset({0})),
    "n=3, votes forgotten": Search(3, 2, forgets=True),
    "n=3, a liar among a majority (not tolerated)": Search(3, 2, liars=frozenset({2})),
    "n=3, required, restored unnoticed, no phase 1": Search(3, 2, mode="required", restores=1, forced=nothing_forced),
    "n=3, required, restored unnoticed, votes forgotten": Search(3, 2, mode="required", restores=1, forgets=True),
}


@pytest.mark.parametrize("name", HOLD)
def test_no_schedule_chooses_two_values(name: str) -> None:
    states, fork = HOLD[name].run()
    assert not fork and states > 100


@pytest.mark.parametrize("name", FORK)
def test_the_search_finds_two_values_with_a_rule_off(name: str) -> None:
    assert FORK[name].run()[1]
