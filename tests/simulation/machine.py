"""One peer's machine: a node of the real core, its disk, its clock, and the driver's work: training, merging, building,
fetching."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import msgspec
from blake3 import blake3

from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.node import AgreementNode
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.records import links_in
from swarm.protocol.agreement.round.instance import name_build
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.ledger import Range, count
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution, WorkPlan
from tests.simulation.disk import Disk
from tests.simulation.setups import COORDINATOR
from tests.simulation.synchronous import CountedBatch
from tests.simulation.tensors import GENESIS, MICRO_BATCH, SCHEDULE, SLICES, told_of_links

if TYPE_CHECKING:
    from tests.simulation.world import World

SPARK_S = 1e-6
RETRY_S = 0.4


def session_of(peer: str, life: int) -> str:
    """Return the name of a peer's process."""
    return f"{peer}.{life}"


class LastBuild(NamedTuple):
    """What this machine has last built from: roster, results, and the state before it."""

    roster: OpenedRoster
    results: tuple[bytes, ...]
    base: bytes


class Machine:
    """A machine and the process on it. `life` counts its processes."""

    def __init__(self, world: World, peer: str, config: AgreementConfig) -> None:
        self.world, self.peer, self.config = world, peer, config
        self.signer = world.signatures.of(peer)
        self.disk = Disk()
        if "damage" in world.setup.rare:
            self.disk.log = []
        if not world.setup.has_genesis and peer in world.setup.peers:
            self.disk.synced.committed = (GENESIS.state_hash,)  # until others have followed it, or the disk is lost
        self.up, self.life, self.frozen_until = False, 0, 0.0
        self.rate, self.offset = 1.0, 0.0
        self.train_s, self.sync_s, self.fetch_s = 0.5, 0.005, 0.1
        self.train_spread = 0.2
        """By which share of it a round's training time may be shorter or longer."""
        self.lives_left: int | None = None
        """If not None: the process dies after so many more actions."""
        self.dies_as = "kept"
        self.restored = False
        """Whether its disk was ever put back from a backup."""
        self.last_build: LastBuild | None = None
        self.extra_states: set[bytes] = set()
        """States that a liar serves."""
        self.blank()

    @property
    def is_coordinator(self) -> bool:
        return self.peer == COORDINATOR

    @property
    def asks(self) -> bool:
        """Whether this coordinator asks its members where they stand, to begin a term."""
        coordinator = None if self.node is None else self.node._coordinator
        return self.up and coordinator is not None and coordinator.inquiry is not None

    @property
    def is_honest(self) -> bool:
        return self.peer not in self.world.setup.lying

    def blank(self) -> None:
        """Forget what a process forgets."""
        self.node: AgreementNode | None = None
        self.timers: dict[str, float] = {}
        self.committed = GENESIS.state_hash
        self.candidate = b""
        self.updates: set[bytes] = set()  # hashes of plans under which an update was made
        self.slices: set[bytes] = set()
        self.merged: dict[tuple[bytes, int], bytes] = {}
        """Names of the results that it has merged as an owner, and sends to all, by exchange and index."""
        self.plan: tuple[WorkPlan, float, bool] | None = None  # (plan, since, whether it was submitted)
        self.exchange = self.room = b""
        self.owners: tuple[str, ...] = ()
        self.fetching = b""
        self.suspects: set[str] = set()
        self.paused = False
        self.batch = CountedBatch(self)

    # -- process -------------------------------------------------------------------------------------------------------

    def start(self, declared: bool = False) -> None:
        """Start the process on what the disk holds."""
        world = self.world
        self.life += 1
        self.blank()
        self.up, self.frozen_until, self.lives_left = True, 0.0, None
        image = self.disk.synced
        if image.committed:
            self.committed = image.committed[-1]
        elif not world.setup.has_genesis:
            self.committed = b""
        states = {*image.committed, *([image.voted] if image.voted else [])}
        if world.setup.has_genesis:
            states.add(GENESIS.state_hash)
        self.slices.update(world.tensors.results.get(image.voted, ()))  # `Persist` asks that a new process serves them
        self.node = AgreementNode(self.config, self.signer, world.work)
        name = session_of(self.peer, self.life)
        seed = blake3(f"{world.seed}{self.peer}{self.life}".encode()).digest()
        self.step(events.Started(dict(image.records), tuple(sorted(states)), name, seed, restored=declared))
        if self.node is not None and not self.is_coordinator:
            self.batch.adopt(self.node.head)
        world.started(self)

    def stop(self, kind: str) -> None:
        """End the process, and do to the disk what this kind of crash does."""
        self.up = False
        self.life += 1
        self.disk.crash(kind, self.world.random)
        self.node = None

    def knows(self, head_hash: bytes) -> bool:
        """Return whether the node, or the disk while there is no process, has the link of that head."""
        if self.node is not None:
            return self.node._chain.link(head_hash) is not None
        return any(record.link.head.hash == head_hash for record in links_in(self.disk.synced.records))

    def local_time(self) -> float:
        return self.offset + self.rate * self.world.now

    def jump(self, seconds: float) -> None:
        """Let the clock jump forward: timers are due earlier."""
        self.offset += seconds
        for id, at in self.timers.items():
            self._arm(id, at)

    def later(self, seconds: float, act: Callable[..., None], *args: Any) -> None:
        """Do this after that time, if this process still lives then."""
        self.world.at(self.world.now + seconds, self, act, *args)

    # -- events and actions --------------------------------------------------------------------------------------------

    def step(self, event: events.Event) -> None:
        """Give the node an event and carry out its actions in order; the process may die between any two."""
        if not self.up or self.node is None:
            return
        life, world = self.life, self.world
        world.steps += 1
        todo = self.node.step(self.local_time(), event)
        if world.tracing:
            world.trace(self, event, todo)
        for action in todo:
            if self.lives_left is not None:
                self.lives_left -= 1
                if self.lives_left < 0:
                    world.crash(self, self.dies_as)
                    return
            self._do(action)
            if self.life != life:
                return

    def _do(self, action: actions.Action) -> None:
        if isinstance(action, actions.Send):
            self.world.send(self, action.peer, action.message)
        elif isinstance(action, actions.SetTimer):
            self.timers[action.id] = action.at
            self._arm(action.id, action.at)
        else:
            self._ACTIONS[type(action)](self, action)

    def _arm(self, id: str, at: float) -> None:
        self.later(max(0.0, (at - self.local_time()) / self.rate) + SPARK_S, self._ring, id, at)

    def _ring(self, id: str, at: float) -> None:
        if self.timers.get(id) == at:
            del self.timers[id]
            self.step(events.TimerFired(id))

    def _cancel_timer(self, action: actions.CancelTimer) -> None:
        self.timers.pop(action.id, None)

    def _persist(self, action: actions.Persist) -> None:
        if action.state and not self.has(action.state):
            self.world.broken("weights", f"{self.peer} writes of a state that it has not ({action.key})")
        self.disk.write(action)
        self.later(self.sync_s * (0.5 + self.world.random.random()), self._sync, action.id)

    def _sync(self, id: int) -> None:
        if self.disk.sync(id):
            self.step(events.Persisted(id))

    # -- work ----------------------------------------------------------------------------------------------------------

    def _train(self, action: actions.Train) -> None:
        if self.plan is not None and self.plan[0] == action.plan:
            if action.finish_early and not self.plan[2]:
                self.later(0.1, self._submit, action.plan)
            return
        self.plan = (action.plan, self.world.now, False)
        if self.world.setup.batch:
            self.batch.begin(action.plan)
            if action.finish_early:
                self.later(0.1, self._submit, action.plan)
            return
        whole_s = self.train_s * (1 + self.train_spread * (2 * self.world.random.random() - 1))
        self.later(min(whole_s, action.plan.deadline_s), self._submit, action.plan)

    def _stop_training(self, action: actions.StopTraining) -> None:
        self.plan = None

    def _submit(self, plan: WorkPlan) -> None:
        if self.plan is None or self.plan[0] != plan or self.plan[2] or self.node is None:
            return
        began = self.plan[1]
        self.plan = (plan, began, True)
        if (mine := plan.of(self.node.me)) is None:
            return
        steps = max(1, min(mine.steps, round(mine.steps * (self.world.now - began) / (0.8 * self.train_s))))
        counted: tuple[Range, ...] = ()
        samples = steps * SCHEDULE.unit
        if self.world.setup.batch:
            counted = self.batch.capture()
            steps, samples = count(counted) // MICRO_BATCH, count(counted)
        if self.paused:
            steps, samples, counted = 0, 0, ()
        self.updates.add(plan.hash)
        rates, client = told_of_links(self.world.setup, plan.hash, self.peer)
        slices = SLICES if steps else 0
        body = Contribution(
            head=plan.head,
            plan=plan.hash,
            member=self.node.me,
            steps=steps,
            samples=samples,
            loss=1.0,
            hashes=tuple(blake3(self.peer.encode() + encode(plan) + bytes([i])).digest() for i in range(slices)),
            sqnorms=(1.0,) * slices,
            counted=counted,
            client=client,
        )
        contribution = self.signer.sign(CONTRIBUTION_KIND, self.world.contribution(self, body))
        self.step(events.LinksMeasured(rates))
        self.step(events.Submitted(contribution, SCHEDULE.steps(GENESIS) / self.train_s))

    def _merge_slices(self, action: actions.MergeSlices) -> None:
        self.exchange, self.owners = action.roster.key, tuple(member.peer for member in action.roster.owners)
        self.later(0.02 + 0.05 * self.world.random.random(), self._merge, action, 0)
        self.later(2.0, self._lacking, action)
        me, contributors = self.node.me if self.node is not None else None, action.roster.contributions
        if self.node is not None and (self.node.head.has(self.node.me) or any(b.member == me for b in contributors)):
            self.room = action.roster.key
            self._build_ahead_soon(action.roster, self.committed)

    def _build_ahead_soon(self, roster: OpenedRoster, base: bytes) -> None:
        self.later(0.02 + 0.06 * self.world.random.random(), self._build_ahead, roster, base)

    def _build_ahead(self, roster: OpenedRoster, base: bytes) -> None:
        """Build from what the owners have sent, once all of it is here."""
        if self.room != roster.key or self.committed != base:
            return
        sent = [self.world.machines[owner].merged if self.reaches(owner) else {} for owner in self.owners]
        results = tuple(merged.get((roster.key, index), b"") for index, merged in enumerate(sent))
        if all(results):
            self._built(roster, results, base)
        else:
            self._build_ahead_soon(roster, base)

    def _merge(self, action: actions.MergeSlices, tries: int) -> None:
        key, indexes = action.roster.key, self._indexes(action)
        if self.exchange != key or not indexes:
            return
        if self._missing(action):
            self.later(RETRY_S, self._merge, action, tries + 1)
            return
        for index in indexes:
            name = self.world.result(self, key, index)
            self.slices.add(name)
            self.merged[key, index] = name
            life = self.life
            self.step(events.SliceResult(key, index, name))
            if self.life != life:
                return

    def _indexes(self, action: actions.MergeSlices) -> tuple[int, ...]:
        return action.roster.parts.get(self.node.me, ()) if self.node is not None else ()

    def _missing(self, action: actions.MergeSlices) -> list[str]:
        wanted = [(body.member.peer, body.plan) for body in action.roster.merged] if self._indexes(action) else []
        return [
            peer for peer, plan in wanted if not self.reaches(peer) or plan not in self.world.machines[peer].updates
        ]

    def _lacking(self, action: actions.MergeSlices) -> None:
        if self.exchange != action.roster.key:
            return
        owners = tuple(sorted({owner for owner in self.owners if not self.reaches(owner)}))
        missing = tuple(sorted(self._missing(action)))
        if owners or missing:
            self.step(events.Missing(action.roster.key, missing, owners))

    def reaches(self, peer: str) -> bool:
        """Whether bytes come from that peer now."""
        return peer == self.peer or (peer in self.world.machines and self.world.reaches(peer, self.peer))

    def _build(self, action: actions.Build) -> None:
        self.candidate, self.room = b"", action.name
        self.later(0.02 + 0.06 * self.world.random.random(), self._try_to_build, action, self.committed, 0)

    def _try_to_build(self, action: actions.Build, base: bytes, tries: int) -> None:
        if self.committed != base:
            return
        machines = self.world.machines
        holders = [machines[p].slices for p in (self.peer, *action.holders) if p in machines and self.reaches(p)]
        displaced = self.room != action.name  # the last builder to come has the room
        if displaced or any(not any(name in held for held in holders) for name in action.results):
            if tries < 8 and not displaced:
                self.later(RETRY_S, self._try_to_build, action, base, tries + 1)
            else:
                self.step(events.Built(action.roster.key, action.name, None))
            return
        self._built(action.roster, action.results, base)

    def _built(self, roster: OpenedRoster, results: tuple[bytes, ...], base: bytes) -> None:
        self.last_build = LastBuild(roster, results, base)
        self.slices.update(results)
        bit = b"a bit" if self.peer in self.world.setup.odd_builds else b""
        self.candidate = self.world.tensors.build(base, roster, results, bit)
        self.step(events.Built(roster.key, name_build(roster.key, results), self.candidate))

    # -- states --------------------------------------------------------------------------------------------------------

    def has(self, state: bytes) -> bool:
        """Whether this machine has that state, or can rebuild it."""
        if self.is_coordinator:
            return False
        return (
            state in (self.committed, self.candidate)
            or (state == GENESIS.state_hash and self.world.setup.has_genesis)
            or self.disk.holds(state)
            or state in self.extra_states
        )

    def _fetch(self, action: actions.Fetch) -> None:
        self.fetching = action.state_hash
        self.later(self.fetch_s * (0.5 + self.world.random.expovariate(1.0)), self._try_to_fetch, action, 0)

    def _try_to_fetch(self, action: actions.Fetch, tries: int) -> None:
        state = action.state_hash
        if self.fetching != state:
            return
        here = self.has(state)
        if not here:
            here = any(self.reaches(p) and self.world.machines[p].has(state) for p in action.holders)
        if not here and tries < 4:
            self.later(RETRY_S, self._try_to_fetch, action, tries + 1)
            return
        self.fetching = b""
        if here and not self.has(state):
            self.candidate = state
        self.step(events.StateFetched(state, here))

    def _commit_head(self, action: actions.CommitHead) -> None:
        self.world.committed(self, action)
        self.committed = action.head.state_hash
        self.plan = None
        if not self.is_coordinator:
            self.batch.adopt(action.head)

    def _tell(self, action: actions.Emit) -> None:
        self.world.told(self, action)

    def _accuse(self, action: actions.Accuse) -> None:
        self.world.accused(self, action)

    _ACTIONS: ClassVar[dict[type[msgspec.Struct], Callable[..., None]]] = {
        actions.CancelTimer: _cancel_timer,
        actions.Persist: _persist,
        actions.Train: _train,
        actions.StopTraining: _stop_training,
        actions.MergeSlices: _merge_slices,
        actions.Build: _build,
        actions.Fetch: _fetch,
        actions.CommitHead: _commit_head,
        actions.Emit: _tell,
        actions.Accuse: _accuse,
    }
