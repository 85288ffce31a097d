"""Who looks after a run: acts some time after being told that it cannot go on, until it does or is lost."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from swarm.protocol.agreement import events
from tests.simulation.setups import COORDINATOR

if TYPE_CHECKING:
    from tests.simulation.churn.world import ChurnWorld

CALLS: Final = {"quorum_lost", "coordinator_restored"}
TRIES_S: Final = 30.0  # between two tries
GIVES_UP_S: Final = 600.0  # of tries: five repairs, after which nobody is awaited who may have the weights
LOOKS_S: Final = 60.0
UNTOLD_S: Final = 900.0  # without a commit, while the coordinator runs and has told nothing


class Operator:
    """Waits `after_s` from the first call, then does `peer regroup` every half minute until a round is committed, with
    `--undo` where the coordinator has just asked for that. Gives the run up for lost after ten minutes of that."""

    def __init__(self, world: ChurnWorld, after_s: float) -> None:
        self._world, self._after_s = world, after_s
        self._calls = 0
        self._called = False
        self._may_undo = False
        self._went_on_at = self._acts_since = 0.0
        self.has_given_up = False
        self.tries = 0
        """How often `peer regroup` was called."""
        self.untold = 0
        """How often the group stood still for long and the coordinator, which was up, told nobody."""
        world.at(LOOKS_S, None, self._look)

    def told(self, event: str) -> None:
        """Hear an event of the coordinator."""
        if event in CALLS:
            self._call()
        elif event == "regroup_undoes":
            self._may_undo = True

    def went_on(self) -> None:
        """A round was committed: what was called for is settled."""
        self._went_on_at = self._world.now
        self._called = self._may_undo = False

    def _call(self) -> None:
        if not self._called:
            self._called = True
            self._calls += 1
            self._acts_since = self._world.now + self._after_s
            self._world.at(self._world.now + self._after_s, None, self._act, self._calls)

    def _act(self, call: int) -> None:
        """Regroup, unless the group has gone on since that call."""
        world, coordinator = self._world, self._world.machines[COORDINATOR]
        if not self._called or call != self._calls:
            return
        world.at(world.now + TRIES_S, None, self._act, call)
        self.has_given_up = world.now - self._acts_since > GIVES_UP_S
        if coordinator.up:
            undo, self._may_undo = self._may_undo, False
            self.tries += 1
            world.note("operator", f"peer regroup{' --undo' if undo else ''}")
            coordinator.step(events.RegroupRequested(undo=undo))

    def _look(self) -> None:
        """Notice a group that stands still although nobody was told."""
        world = self._world
        world.at(world.now + LOOKS_S, None, self._look)
        since = max(self._went_on_at, world.up_since(COORDINATOR))
        if not self._called and world.now - since > UNTOLD_S:
            self.untold += 1
            world.note("operator", "notices that nothing moves")
            self._call()
