"""Hours of one group whose machines fail and are repaired at random times, on an ordinary network."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from random import Random
from typing import Final

from swarm.protocol.agreement import actions
from swarm.protocol.agreement.config import AgreementConfig, Mode
from swarm.protocol.agreement.work import Work
from tests.simulation.churn.operator import Operator
from tests.simulation.electorate import position
from tests.simulation.machine import Machine
from tests.simulation.setups import COORDINATOR, Setup
from tests.simulation.tensors import GENESIS, SCHEDULE, SLICES
from tests.simulation.world import World

TRAIN_S: Final = 9.6  # a round of a quiet group then takes 9.9 s (two members) to 10.1 s (eight)
TRAIN_SPREAD: Final = 0.005
COMPUTE_MAX_S: Final = 60.0  # after which any round's training ends
FIRST_S: Final = 30.0  # without failures, for the group to begin
NO_FAULTS: Final = range(1000)  # of those that a short schedule draws
LINKS_KEPT: Final = 300  # by a node: fewer than in real use, as what the world has forgotten counts as forged
HEADS_KEPT: Final = 2 * LINKS_KEPT  # and more than are committed while any machine is away
NOTES_KEPT: Final = 2000

WORK: Final = Work(
    replace(SCHEDULE, compute_s_max=COMPUTE_MAX_S), slices=lambda head: SLICES, exchange_s=lambda head: 4.0
)


@dataclass(frozen=True)
class Churn:
    """How machines fail and what people do. Times are in seconds; those between events are exponential."""

    members: int
    mode: Mode
    coordinator_down: float
    """The share of the time in which the coordinator is away."""
    disks_lost: float
    """The share of the members' repairs that bring another disk. The coordinator keeps its disk."""
    operator_s: float = 7200.0
    """The operator acts so long after being told that the group cannot go on."""
    undo_s: float = 100.0
    """`AgreementConfig.undo_s`."""
    fails_s: float = 600.0
    """Mean time of a member between a repair and the next failure."""
    repair_s: float = 120.0
    """Mean time of any repair."""

    def up_s(self, peer: str) -> float:
        """Return the mean time between a repair of this peer and its next failure."""
        if peer != COORDINATOR:
            return self.fails_s
        down = self.coordinator_down
        return self.repair_s * (1 - down) / down if down else math.inf


class ChurnWorld(World):
    """A world whose failures come from `Churn`. The same seed gives both modes the same failures."""

    def __init__(self, churn: Churn, seed: int) -> None:
        self.churn = churn
        name = f"{churn.mode}{churn.members}-churn"
        super().__init__(
            Setup(name, churn.members, churn.mode, faults_s=0.0, links_kept=LINKS_KEPT), seed, without=NO_FAULTS
        )
        self.work = WORK
        self.operator = Operator(self, churn.operator_s)
        self.committed_at: list[float] = []
        """When each round was committed first."""
        self.starts = self.undoing = 0
        """Terms that the coordinator has started after the first one, and those that took certified rounds back."""
        self.top = GENESIS
        self._up_since: dict[str, float] = {}
        self._failures = {peer: Random(f"churn of {churn.members}, {seed}: {peer}") for peer in self.machines}
        for peer, machine in self.machines.items():
            machine.train_s, machine.train_spread = TRAIN_S, TRAIN_SPREAD
            self._fail_later(peer, FIRST_S)

    def _config(self, peer: str) -> AgreementConfig:
        """Return the times of real use: the defaults."""
        return AgreementConfig(
            genesis=GENESIS,
            peer=peer,
            coordinator=COORDINATOR,
            mode=self.setup.mode,
            lone_survivor=self.setup.lone_survivor,
            min_peers=self.setup.members,
            max_peers=self.setup.members + 4,
            undo_s=self.churn.undo_s,
        )

    def _is_over(self) -> bool:
        return self.operator.has_given_up

    # -- failures ------------------------------------------------------------------------------------------------------

    def _fail_later(self, peer: str, after_s: float = 0.0) -> None:
        up_s = self.churn.up_s(peer)
        if up_s < math.inf:
            self.at(self.now + after_s + self._failures[peer].expovariate(1 / up_s), None, self._fail, peer)

    def _fail(self, peer: str) -> None:
        random = self._failures[peer]
        lost = random.random() < self.churn.disks_lost and peer != COORDINATOR
        self.crash(self.machines[peer], "wiped" if lost else random.choice(("kept", "unsynced", "prefix")))
        self.at(self.now + random.expovariate(1 / self.churn.repair_s), None, self._repair, peer)

    def _repair(self, peer: str) -> None:
        self.restart(peer)
        self._fail_later(peer)

    def restart(self, peer: str, declared: bool = False) -> None:
        super().restart(peer, declared)
        self._up_since[peer] = self.now

    def up_since(self, peer: str) -> float:
        """Return when the process of a peer began; infinity if it does not run."""
        return self._up_since.get(peer, math.inf) if self.machines[peer].up else math.inf

    # -- what happens --------------------------------------------------------------------------------------------------

    def committed(self, machine: Machine, action: actions.CommitHead) -> None:
        head = action.head
        is_new = head.hash not in self.invariants.heads
        super().committed(machine, action)
        if position(head) > position(self.top):
            self.top = head
        if is_new and head.attempt >= 0:
            self.committed_at.append(self.now)
            self.operator.went_on()
            if len(self.invariants.heads) > 2 * HEADS_KEPT:
                self._forget()

    def told(self, machine: Machine, action: actions.Emit) -> None:
        super().told(machine, action)
        if machine.is_coordinator:
            self.operator.told(action.event)
        if action.event == "regrouped" and self.top.members:
            self.starts += 1
            self.undoing += bool(action.fields["undone"])

    def _forget(self) -> None:
        self.invariants.forget(HEADS_KEPT)
        self.signatures.forget()
        machines = self.machines.values()
        held = {state for m in machines for state in (m.committed, m.candidate, m.disk.synced.voted)}
        self.tensors.forget(held | {state for m in machines for state in m.disk.synced.committed}, 2 * HEADS_KEPT)

    def note(self, who: str, what: str) -> None:
        super().note(who, what)
        if len(self.timeline) > 2 * NOTES_KEPT:
            del self.timeline[:-NOTES_KEPT]
