"""A machine's part in a synchronous pipeline: replicas together count a batch, and the leader asks what they have.

Which replica counts a micro-batch is a matter of chance here, as it is of the router in real use."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from swarm.protocol.agreement import events
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, contains, count, union
from swarm.protocol.plan import WorkPlan
from tests.simulation.tensors import MICRO_BATCH

if TYPE_CHECKING:
    from tests.simulation.machine import Machine
    from tests.simulation.world import World

POLL_S: Final = 0.2
STALL_S: Final = 0.8  # without progress, after which a leader has dispatched again what is missing
TWICE: Final = 0.04  # of the micro-batches have a lost answer while there are faults, so that another replica counts it
LOST: Final = 0.03  # of the captures: the worker has died after the leader has asked


class CountedBatch:
    """What one machine has counted of the batch of the round after the head whose weights it has."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.head: Head | None = None
        self.counted: set[int] = set()
        """The first samples of micro-batches."""
        self._plan: WorkPlan | None = None
        self._told = b""  # the hash of the last plan whose batch was complete

    @property
    def _world(self) -> World:
        return self._machine.world

    @property
    def batch(self) -> Range:
        """The samples of the round, by no rule of the core: batch after batch."""
        assert self.head is not None
        first = self.head.ledger.cursor
        return first, first + self._world.setup.batch

    def adopt(self, head: Head) -> None:
        """Begin with a head's round: all of a batch is settled with its round."""
        self.head, self._plan = head, None
        self.counted.clear()

    # -- counting ------------------------------------------------------------------------------------------------------

    def begin(self, plan: WorkPlan) -> None:
        """Dispatch this machine's part of a plan, and forget what is to be forgotten."""
        me, machine = self._machine.node.me if self._machine.node is not None else None, self._machine
        if self.head is None or self.head.hash != plan.head or me is None:
            return
        mine = plan.of(me)
        if mine is not None and mine.reset:
            self.counted.clear()
        self._plan = plan
        first, last = self.batch
        number = [assignment.member for assignment in plan.assignments].index(me)
        for at in range(first, last, MICRO_BATCH):
            own = contains(mine.ranges, [(at, at + MICRO_BATCH)]) if mine is not None else False
            dealt = at // MICRO_BATCH % len(plan.assignments) == number  # another stage's micro-batches
            if own or (self._world.setup.stage and dealt):
                machine.later(machine.train_s * self._world.random.random(), self._dispatch, plan.head, at)
        machine.later(POLL_S, self._gather, plan, len(self.counted), self._world.now)

    def _dispatch(self, head: bytes, at: int) -> None:
        """Let some replica count a micro-batch that none of those in reach has counted."""
        if self.head is None or self.head.hash != head:
            return
        replicas, random = self._reached(head), self._world.random
        if any(at in replica.counted for replica in replicas):
            return
        random.choice(replicas).counted.add(at)
        if self._world.now < self._world.heals_at and random.random() < TWICE:
            random.choice(replicas).counted.add(at)

    def _reached(self, head: bytes) -> list[CountedBatch]:
        """Return what the replicas hold that stand at that head, and from which bytes come."""
        machines = self._world.machines.values()
        found = [m.batch for m in machines if m is self._machine or (m.up and self._machine.reaches(m.peer))]
        return [batch for batch in found if batch.head is not None and batch.head.hash == head]

    # -- the leader's question -----------------------------------------------------------------------------------------

    def _gather(self, plan: WorkPlan, known: int, grown_at: float) -> None:
        """Ask all replicas while this machine leads; dispatch again what stays missing."""
        machine, world = self._machine, self._world
        if self._plan != plan or machine.node is None or self.head is None:
            return
        if machine.node.phase == "leading" and plan.hash != self._told:
            first, last = self.batch
            workers = {machine.peer, *machine.node.workers} - machine.suspects
            replicas = [batch for batch in self._reached(plan.head) if batch._machine.peer in workers]
            claims = {batch._machine.peer: batch.claims() for batch in replicas}
            if union(r for ranges in claims.values() for r in ranges) == ((first, last),):
                self._told = plan.hash
                world.covered["batch gathered"] += 1
                machine.step(events.Gathered(plan.head, claims))
            else:
                held = sum(count(ranges) for ranges in claims.values())
                if held > known:
                    known, grown_at = held, world.now
                elif world.now - grown_at > STALL_S:
                    grown_at = world.now
                    self._again(plan.head, claims)
        machine.later(POLL_S, self._gather, plan, known, grown_at)

    def _again(self, head: bytes, claims: dict[str, tuple[Range, ...]]) -> None:
        """Dispatch what none of those that were asked has."""
        first, last = self.batch
        held = [r for ranges in claims.values() for r in ranges]
        for at in range(first, last, MICRO_BATCH):
            if not contains(held, [(at, at + MICRO_BATCH)]):
                self._world.random.choice(self._reached(head)).counted.add(at)

    def claims(self) -> tuple[Range, ...]:
        """Return what this machine says that it has counted."""
        liar = self._world.liars.get(self._machine.peer)
        return liar.claims(self._held(), self.batch) if liar is not None else self._held()

    def _held(self) -> tuple[Range, ...]:
        return union((at, at + MICRO_BATCH) for at in self.counted)

    def capture(self) -> tuple[Range, ...]:
        """Return what this machine submits. Its worker goes on adding to it."""
        world = self._world
        if world.now < world.heals_at and world.random.random() < LOST:
            self.counted.clear()
            world.covered["counted samples lost"] += 1
        return self._held()
