"""One schedule of the driver: the processes of real drivers, with the faults and invariants of the simulated core."""

from __future__ import annotations

import heapq
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any, Final
from unittest.mock import patch

import pytest
import trio

from peer.events import Event
from peer.net.method import Method
from swarm.protocol.agreement import actions
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.packing import unpacked
from swarm.protocol.head import Head, genesis
from swarm.protocol.plan import Contribution
from swarm.rounds.exchange import audits
from swarm.rounds.records import RecordFiles
from swarm.state.outer_state import OuterState
from tests.simulation import faults
from tests.simulation.driven.disk import PeerDisk
from tests.simulation.driven.lying_slices import REFUSED, SliceLiar, draw
from tests.simulation.driven.machine import CODEC, NUMEL, DrivenMachine, first_state, watched
from tests.simulation.driven.virtual import repeatable, run_virtually
from tests.simulation.histories.checks import History
from tests.simulation.invariants import Broken, Invariants, OutsidePromise
from tests.simulation.liveness import NOT_PROMISED, Liveness
from tests.simulation.net import Network
from tests.simulation.setups import COORDINATOR, Setup
from tests.simulation.signatures import Signatures
from tests.simulation.tensors import State, Tensors
from tests.simulation.world import TAGS, World
from tests.swarm.support.group import diloco

PLAYED = {"drop", "duplicate", "tails", "slow_types", "join", "cut", "crash", "freeze", "operator", "suspect"} | {
    "slow_peer",
    "slow_disks",
}
"""The faults that a driver can be made to have: all processes share one clock, and no disk is put back."""
AUDITED_SHARE: Final = 1.0  # with liars: each honest member audits each commit


class DrivenWorld:
    """All machines and what must always hold, with the face of `tests.simulation.world.World`."""

    def __init__(self, setup: Setup, seed: int, without: Collection[int] = ()) -> None:
        self.setup, self.seed, self.steps = setup, seed, 0
        self.random = Random(f"driven {setup.name} {seed}")
        self.heals_at, self.began = setup.faults_s, 0.0
        self.covered: Counter[str] = Counter()
        self.timeline: list[str] = []
        self.signatures, self.tensors = Signatures(), Tensors()
        self.network = Network(Random(f"driven net {setup.name} {seed}"), self.heals_at)
        judged = self._judged()
        self.invariants, self.liveness, self.history = Invariants(judged), Liveness(judged), History()
        self.liars: dict[str, SliceLiar] = {}
        self.gone: set[str] = set()
        self.asked_at = -1e9
        first = OuterState.in_memory(first_state(), diloco(NUMEL, CODEC))
        self.genesis = genesis("run", first.tree.root)
        self.tensors.states[first.tree.root] = State()
        self.invariants.heads = {self.genesis.hash: self.genesis}
        self.invariants.values = {self.genesis.hash: self.genesis}
        self.machines: dict[str, DrivenMachine] = {}
        self.faults = faults.draw(setup, self.random)
        played = enumerate(self.faults)
        self.kept = [fault for index, fault in played if index not in without and fault.kind in PLAYED]
        self.failure: Broken | None = None
        self._queue: list[tuple[float, int, DrivenMachine | None, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._sooner = trio.Event()
        self._starting: set[str] = set()
        lies = Random(f"driven lies {setup.name} {seed}")
        self.liars.update((peer, draw(self, peer, lies)) for peer in sorted(setup.lying))

    @property
    def now(self) -> float:
        return trio.current_time() - self.began

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def at(self, time: float, machine: DrivenMachine | None, act: Callable[..., None], *args: Any) -> None:
        """Do this then, if the machine's present process still lives."""
        self._count += 1
        life = machine.life if machine is not None else 0
        heapq.heappush(self._queue, (time, self._count, machine, life, act, args))
        self._sooner.set()

    def run(self) -> DrivenWorld:
        """Run the schedule to its end, or as far as the promise goes. Raises `Broken`, or what the driver raises."""
        shared, judged = Path("/dev/shm"), self._judged()
        folder = tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None)
        with folder as path, pytest.MonkeyPatch.context() as patches:
            for peer in (COORDINATOR, *self.setup.peers, *self.setup.joining):
                config = replace(World._config(judged, peer), genesis=self.genesis)
                machine = DrivenMachine(self, peer, config, PeerDisk(Path(path) / peer, patches))
                machine.train_s = self.random.choice((0.3, 0.5, 1.0))
                self.machines[peer] = machine
            with (
                repeatable(f"{self.setup.name} {self.seed}", self.signatures, self.disk_s),
                watched(self.machines.__getitem__),
                patch.object(audits, "SHARE", AUDITED_SHARE if self.liars else audits.SHARE),
            ):
                run_virtually(self._run)
        return self

    def _judged(self) -> Any:
        """Return this world as what was written for the other one takes it."""
        return self

    async def _run(self) -> None:
        self.began = trio.current_time()
        for liar in self.liars.values():
            self.note(liar.peer, f"lies as {liar.name}")
        for fault in self.kept:
            self.at(fault.at, None, self._fault, fault)
        for peer in (COORDINATOR, *self.setup.peers):
            self.at(self.random.random(), None, self.restart, peer)
        if self.setup.coordinator_dies:
            raise ValueError("a coordinator that dies for good is not driven")
        self.at(self.heals_at, None, self._heal)
        async with trio.open_nursery() as self.tasks:
            with self._judging():
                await self._act(self.heals_at + self.setup.calm_s)
                self.liveness.check()
                self.history.check()
            self.tasks.cancel_scope.cancel()
        if self.failure is not None:
            raise self.failure

    async def _act(self, until: float) -> None:
        while self.now < until:
            self._sooner = trio.Event()
            soonest = min(self._queue[0][0] if self._queue else until, until)
            with trio.move_on_at(self.began + soonest):
                await self._sooner.wait()
            while self._queue and self._queue[0][0] <= self.now:
                _, _, machine, life, act, args = heapq.heappop(self._queue)
                if machine is None or machine.life == life:
                    act(*args)
                if self.now > self.heals_at and self.liveness.is_reached():
                    return

    @contextmanager
    def _judging(self) -> Iterator[None]:
        """End the schedule at what does not hold, wherever it is noticed."""
        try:
            yield
        except Broken as error:
            self.failure = self.failure or error
            self.tasks.cancel_scope.cancel()
        except OutsidePromise as error:
            self.covered[NOT_PROMISED] += 1
            self.note("", str(error))
            self.tasks.cancel_scope.cancel()

    def _heal(self) -> None:
        self.network.cut.clear()
        self.note("healed", "")
        self.liveness.begin()
        self.at(self.now + 0.5, None, self._look)

    def _look(self) -> None:
        """Let the clock come by, so that the end is noticed."""
        self.at(self.now + 0.5, None, self._look)

    def _fault(self, fault: faults.Fault) -> None:
        self.covered[f"fault {fault.kind}"] += 1
        self.note("FAULT", f"{fault.kind} {fault.args}")
        faults.apply(self._judged(), fault)

    # -- machines ------------------------------------------------------------------------------------------------------

    def restart(self, peer: str, declared: bool = False) -> None:
        """Start the process of a peer, if it does not run."""
        machine = self.machines[peer]
        if not machine.up and peer not in self._starting:
            self._starting.add(peer)
            self.tasks.start_soon(self._live, machine)

    async def _live(self, machine: DrivenMachine) -> None:
        async with machine.alone:
            self.note(machine.peer, "starts")
            await machine.live()

    def started(self, machine: DrivenMachine) -> None:
        """Let all others find a machine that has started: they hear of it as they do of records."""
        self._starting.discard(machine.peer)
        for other in self.machines.values():
            other.suspects.discard(machine.peer)

    def crash(self, machine: DrivenMachine, kind: str) -> None:
        """End the process of a machine; after a while the others suspect it."""
        if not machine.up or machine.peer in self._starting:
            return
        self.covered[f"crash {kind}"] += 1
        self.note(machine.peer, f"CRASHES, disk {kind}")
        machine.stop(kind)
        for other in sorted(self.machines):
            self.at(self.now + self.random.uniform(0.3, 3.0), None, self.suspect, other, machine.peer)

    def suspect(self, by: str, suspected: str, truly: bool = True) -> None:
        """Let one peer's failure detector suspect another (`truly`: only if bytes of it do not come now)."""
        if by != suspected and self.machines[by].up and not (truly and self.reaches(suspected, by)):
            self.machines[by].suspects.add(suspected)

    def reaches(self, source: str, target: str) -> bool:
        """Whether bytes come from one peer to the other now."""
        machine = self.machines[source]
        return machine.up and machine.frozen_until <= self.now and not self.network.is_cut(source, target)

    def disk_s(self, owner: Any) -> float:
        """Return how long a thread that writes records takes."""
        if not isinstance(owner, RecordFiles):
            return 0.0
        machine = self.machines[owner._folder.parent.name]
        return machine.sync_s * (0.5 + self.random.random())

    # -- what drivers do -----------------------------------------------------------------------------------------------

    def ways(self, source: str, target: str, method: Method[Any, Any], body: bytes) -> tuple[float, ...]:
        """Return after how many seconds each copy of a request or reply arrives; none if it is lost."""
        tag = method.name.rpartition("/")[2]
        return () if self.network.is_cut(source, target) else self.network.delays(source, target, tag, self.now)

    def sent(self, machine: DrivenMachine, target: str, message: msg.Message) -> None:
        """Judge what a driver is told to send, in the order of its node's actions: calls may overtake each other."""
        judged: Any = machine
        self.covered[TAGS[type(message)]] += 1
        if not machine.is_honest:
            return
        with self._judging():
            self.invariants.sent(judged, target, unpacked(message))

    def received(self, machine: DrivenMachine, source: str, messages: Iterable[msg.Message]) -> None:
        """Note what the coordinator hears."""
        for message in messages if machine.is_coordinator else ():
            self.invariants.coordinator_received(source, unpacked(message))

    def committed(self, machine: DrivenMachine, action: actions.CommitHead) -> None:
        """Judge a commit, once the driver stands there."""
        judged: Any = machine
        head = action.head
        self.note(machine.peer, f"commits term {head.term} round {head.round} {head.hash.hex()[:6]}")
        if machine.is_coordinator:
            self.history.add(machine.peer, [("head_seen", {"round": head.round})])
        if not machine.is_honest:
            return
        with self._judging():
            self.invariants.committed(judged, action)

    def stood(self, machine: DrivenMachine, head: Head, merged: bool) -> None:
        """Note what an honest peer would tell of a commit."""
        if not machine.is_honest:
            return
        fields = {
            "round": head.round, "term": head.term, "state_hash": head.state_hash.hex(), "head": head.hash.hex(),
            "previous": head.previous.hex(), "members": len(head.members), "tokens": head.tokens,
        }  # fmt: skip
        self.history.add(f"{machine.peer} {machine.life}", [("round_committed" if merged else "head_adopted", fields)])

    def emitted(self, machine: DrivenMachine) -> Callable[[Event], None]:
        """Return what notes the events of a machine's process."""

        def note(event: Event) -> None:
            self.covered[f"tell {event.name}"] += 1
            if event.name not in ("phase_entered", "attempt_begun", "round_planned", "state_progress"):
                self.note(machine.peer, f"{event.name} {event.fields}")
            if machine.is_coordinator:
                self.liveness.told(event.name)
            if event.name == "regrouped":
                self.history.add(machine.peer, [(event.name, event.fields)])
            with self._judging():
                if event.name == "bug":
                    raise Broken("0 total", str(event.fields))
                if machine.is_honest:
                    self._judge_event(machine, event)

        return note

    def _judge_event(self, machine: DrivenMachine, event: Event) -> None:
        """Judge whom an honest peer penalizes, and what its audits find. Raises `Broken`."""
        if event.name not in ("peer_penalized", "slice_audited"):
            return
        liar = self.liars.get(str(event.fields["peer"]))
        if event.name == "peer_penalized":
            if liar is None:
                raise Broken("12 honest is never penalized", f"{machine.peer}: {event.fields}")
            self.covered[f"told on {liar.name}"] += 1
            liar.told_on_by.add(machine.peer)
        elif event.fields["is_true"] is False and (liar is None or machine.peer not in liar.told_on_by):
            raise Broken("15 liars are told on", f"{machine.peer} found a false result and told on no one: {event}")

    # -- what liars have said ------------------------------------------------------------------------------------------

    def heard_lie(self, machine: DrivenMachine, liar: SliceLiar, method: str, code: str) -> None:
        """Judge what an honest peer answers to a slice that is not what was committed to."""
        with self._judging():
            if machine.is_honest and not code:
                raise Broken("15 liars are told on", f"{machine.peer} took {method} of {liar.peer}: {liar.name}")
            if machine.is_honest and code in REFUSED and machine.peer not in liar.told_on_by:
                raise Broken("15 liars are told on", f"{machine.peer} refused {liar.name} and told no one")

    def merged(self, machine: DrivenMachine, bodies: Iterable[Contribution], bundle: int) -> None:
        """Judge what an honest owner has merged."""
        for body in bodies:
            liar = self.liars.get(body.member.peer)
            if len(body.hashes) != len(body.sqnorms) or bundle >= len(body.hashes):
                self.broken("15 liars are told on", f"{machine.peer} merged a contribution with too few slices")
            if liar is not None and (body.plan, bundle, body.sqnorms[bundle]) in liar.false_norms:
                self.broken("15 liars are told on", f"{machine.peer} merged slices of another norm: {liar.name}")

    def built(self, machine: DrivenMachine, results: Collection[bytes]) -> None:
        """Judge the results that an honest peer has built a state of."""
        if any(not liar.impossible.isdisjoint(results) for liar in self.liars.values()):
            self.broken("5 weights", f"{machine.peer} built a state of a result that is no merge")

    def broken(self, invariant: str, what: str) -> None:
        """Say that an invariant does not hold."""
        with self._judging():
            raise Broken(invariant, what)

    def note(self, who: str, what: str) -> None:
        """Write a line of the timeline."""
        self.timeline.append(f"{self.now:7.2f} {who:>5} {what}")
