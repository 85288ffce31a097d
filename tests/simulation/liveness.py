"""Invariant 13: where the rules promise it, all honest peers go on together soon after the last fault."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from swarm.protocol.agreement import events
from swarm.protocol.agreement.coordination.inquiry import REMEMBERED
from swarm.protocol.agreement.node import AgreementNode
from swarm.protocol.head import Head
from tests.simulation import electorate
from tests.simulation.aftermath import Left
from tests.simulation.electorate import position
from tests.simulation.setups import COORDINATOR

if TYPE_CHECKING:
    from tests.simulation.machine import Machine
    from tests.simulation.world import World

PERSON_S: Final = 8.0  # the operator looks this often
NOTICED: Final = 3  # looks in a row at which nothing has moved, after which the operator acts without having been told
JOIN_ROUNDS: Final = 8  # of one term, after which those that have asked are members
FETCHES_PER_ROUND: Final = 2.5  # a peer that can fetch so many states in a round comes in for sure
GIVES_TIME: Final = {"regroup_withdrawn", "regrouped"}
"""The group goes on by itself, or in a new term: the operator waits for a few looks, until called again."""
CALLS: Final = {"quorum_lost", "coordinator_restored"}
LOST: Final = CALLS | {"regroup_failed"}
"""What the operator hears where no state is left."""
NOT_PROMISED: Final = "not promised"
"""What schedules are counted under of which nothing is promised in the end: they show only safety."""
SAFE_S: Final = 8.0  # for which those are watched of whom nothing is promised
STEPS_MAX: Final = 5_000  # in which those that are left go on


class Liveness:
    """Whether the group goes on, and the operator who ends a lost quorum."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.left: Left | None = None
        """Those that were healed; None: all."""
        self._lost_at: set[bytes] = set()  # heads at which the coordinator has called the operator
        self._steps = 0  # until this count begins
        self._from: dict[tuple[int, int], int] | None = None
        """The furthest round of each term, and boot id, as the faults ended."""
        self._checked_at = 0.0
        self._reached = self._goes_on = False
        self._told: set[str] = set()
        self._vain = 0
        self._seen = (0, 0, 0)
        self._stood = self._looks_off = 0
        self._untold = False

    def begin(self) -> None:
        """Count from here."""
        self._from = {(head.term, head.boot): head.round for head in sorted(self._heads(), key=position)}
        self._steps = self._world.steps
        self._world.at(self._world.now + PERSON_S, None, self._look)

    def told(self, event: str) -> None:
        self._told.add(event)
        node = self._world.machines[COORDINATOR].node
        if event in LOST and node is not None:
            self._lost_at.add(node.head.hash)
        if event == "regrouped":
            self._told -= CALLS  # if the new term does not go on either, the coordinator must call again
        if event in GIVES_TIME:
            self._looks_off = NOTICED
        elif event in CALLS:
            self._looks_off = 0

    def _look(self) -> None:
        """Be the operator: regroup where the coordinator asks for it."""
        world, coordinator = self._world, self._world.machines[COORDINATOR]
        world.at(world.now + PERSON_S, None, self._look)
        if not coordinator.up or coordinator.node is None or not self._is_needed():
            return
        if self._looks_off > 0:
            self._looks_off -= 1
            return
        top = max((position(head) for head in self._heads()), default=(0, 0, 0))
        stands, self._seen = top == self._seen and top[0] > 0 and not self._is_complete(top[2]), top
        if not self._told & CALLS:
            self._stood += stands
            if self._stood < NOTICED:
                return
            self._untold = True
        self._vain += 1
        undo = "regroup_undoes" in self._told
        without = tuple(sorted(world.setup.lying)) if self._vain > 2 else ()
        self._told -= {"regroup_undoes"}
        world.covered["operator regroups"] += 1
        world.note("operator", f"peer regroup undo={undo} without={without}")
        world.asked_at = world.now
        coordinator.step(events.RegroupRequested(without=without, undo=undo))

    def _is_needed(self) -> bool:
        """Return whether the operator acts: not where those that are left must go on by themselves, nor at a
        coordinator that is cut off for ever."""
        left = self.left
        return left is None or (left.hope != "alone" and COORDINATOR in left.peers)

    def _is_complete(self, round: int) -> bool:
        return 0 < self._world.setup.rounds <= round

    def _honest(self) -> list[Machine]:
        machines = self._world.machines.values()
        peers = self._world.machines if self.left is None else self.left.peers
        return [
            m
            for m in machines
            if m.up and m.is_honest and not m.is_coordinator and m.node is not None and m.peer in peers
        ]

    def _heads(self) -> list[Head]:
        return [machine.node.head for machine in self._honest() if machine.node is not None]

    def is_reached(self) -> bool:
        """Return whether all honest live peers stand together, two rounds on. Looks twice a second."""
        world = self._world
        if world.now - self._checked_at < 0.5:
            return False
        self._checked_at = world.now
        if self.left is not None and self.left.hope == "open":
            return world.now > world.heals_at + SAFE_S
        if self.left is not None and self.left.hope == "lost":
            return self._is_told()
        if self._from is None or not self._heads() or world.now < world.heals_at + 3.5:
            return False
        expected = self._expected()
        heads = [m.node.head for m in expected if m.node is not None]
        if not heads:
            return False
        rounds = [head.round for head in heads]
        together = max(rounds) - min(rounds) <= 1 and len({(head.term, head.boot) for head in heads}) == 1
        self._goes_on = together and (
            min(rounds) >= self._went_on_from(heads[0]) + self._world.setup.rounds_on or self._is_complete(min(rounds))
        )
        self._reached = self._goes_on and self._have_joined(expected)
        return self._reached

    def _may_still_join(self) -> bool:
        """Return whether newcomers of a group that goes on have had too few rounds of this term to become members: a
        slow member's rounds take long."""
        heads = self._world.invariants.heads.values()
        top = max(heads, key=position)
        return self._goes_on and top.round - self._began_at(top) < JOIN_ROUNDS

    def _began_at(self, head: Head) -> int:
        """Return the first round of that head's term: that of its start."""
        term = (head.term, head.boot)
        return min(one.round for one in self._world.invariants.heads.values() if (one.term, one.boot) == term)

    def _went_on_from(self, head: Head) -> int:
        """Return the furthest round of that head's term as the faults ended; of a later term the first one. Another
        branch may have gone further: a group need not overtake what it has left."""
        found = (self._from or {}).get((head.term, head.boot))
        return self._began_at(head) if found is None else found

    def _expected(self) -> list[Machine]:
        """Return the honest peers that must stand together; not those outside the group that take longer to fetch a
        state and to write it than the group takes for a round: no round waits for them."""
        top = max(self._heads(), key=position)
        round_s = (self._world.now - self._world.heals_at) / max(1, top.round - self._went_on_from(top))
        return [
            m
            for m in self._honest()
            if m.node is not None and (m.node.me in top.members or FETCHES_PER_ROUND * (m.fetch_s + m.sync_s) < round_s)
        ]

    def _have_joined(self, expected: list[Machine]) -> bool:
        if not self._world.setup.must_join:
            return True
        top = max((m.node.head for m in expected if m.node is not None), key=position)
        return all(m.node is None or m.node.me in top.members for m in expected)

    def check(self) -> None:
        """Raise if the group stands still although the rules promise that it goes on."""
        from tests.simulation.invariants import Broken

        if self.left is not None:
            self._check_left()
            return
        if self._untold and not self._world.liars and self._is_promised():
            raise Broken("13 told", "the group stood still and no operator was told")
        if self._reached or self._may_still_join():
            return
        if not self._is_promised() or not self._expected():
            self._world.covered[NOT_PROMISED] += 1
            return
        places = [f"{m.peer}:{position(m.node.head)}" for m in self._honest() if m.node is not None]
        raise Broken("13 liveness", f"{self._world.setup.calm_s:.0f} s after the last fault: {' '.join(places)}")

    def _is_told(self) -> bool:
        """Return whether the coordinator has called the operator at the head where it stands."""
        node = self._world.machines[COORDINATOR].node
        return node is not None and node.head.hash in self._lost_at

    def _check_left(self) -> None:
        """Raise if those that are left have not done what their disks said they could."""
        from tests.simulation.invariants import Broken

        assert self.left is not None
        hope, steps, world = self.left.hope, self._world.steps - self._steps, self._world
        if hope == "lost" and not self._is_told():
            raise Broken("13 told", "no state is left, and no operator was told")
        if hope not in ("alone", "operator"):
            world.covered[NOT_PROMISED] += hope == "open"
            return
        if self._untold and not world.liars:
            raise Broken("13 told", "those that are left stood still and no operator was told")
        if steps > STEPS_MAX:
            raise Broken("13 liveness", f"{steps} steps since the last fault")
        if not self._reached and not self._may_still_join():
            places = [f"{m.peer}:{position(m.node.head)}" for m in self._honest() if m.node is not None]
            who = f"{' '.join(sorted(self.left.peers))} can go on ({hope})"
            raise Broken("13 liveness", f"{world.setup.calm_s:.0f} s after the last fault: {who}: {' '.join(places)}")

    def _is_promised(self) -> bool:
        world, setup = self._world, self._world.setup
        honest = self._honest()
        if not honest:
            return False
        if len(honest) < setup.members and not self._has_begun():
            return False  # the group waits for as many peers as it may begin with
        coordinator = world.machines[COORDINATOR]
        if coordinator.up and coordinator.node is not None:
            return len(honest) > 0 if setup.mode == "witness" else not self._is_halved(coordinator.node)
        if setup.mode == "required":
            return False
        staying = {m.node.me for m in honest if m.node is not None}
        known = max(self._heads(), key=position)  # the last certificate may have died with the coordinator
        if known.attempt < 0 and any(head.round > known.round for head in self._heads()):
            return False  # a start was overtaken, and its members part until the coordinator signs the next one
        holders = any(m.has(known.state_hash) for m in honest)
        return bool(known.members) and electorate.is_quorum(setup, known, staying) and holders

    def _is_halved(self, coordinator: AgreementNode) -> bool:
        """Return whether builds that differ divide those that the next start of a required group takes in, and neither
        side is most of them: only the operator can say which one to leave out."""
        near = coordinator._chain.ancestors()[:REMEMBERED]
        peers = {member.peer for head in near for member in head.members}
        odd = peers & self._world.setup.odd_builds
        return bool(odd) and 2 * max(len(odd), len(peers - odd)) <= len(peers)

    def _has_begun(self) -> bool:
        """Return whether any live peer knows that the group has begun; else that is lost with a disk."""
        nodes = [m.node for m in self._world.machines.values() if m.up and m.is_honest]
        return any(node is not None and node.head.members for node in nodes)
