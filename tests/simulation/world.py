"""One schedule: nodes of the real core under one seeded scheduler and virtual time."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from random import Random
from typing import Any
from unittest.mock import patch

from peer.identity import Signed
from swarm.protocol.agreement import actions, events, packing, records
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.packing import PACKED_MIN, unpacked
from swarm.protocol.agreement.records import LINKS_KEPT
from swarm.protocol.agreement.round import attempt, leader
from swarm.protocol.agreement.round.attempt import DIRECT_MAX
from swarm.protocol.plan import Contribution
from tests.simulation import aftermath, faults, liars, rare_faults
from tests.simulation.invariants import Broken, Invariants, OutsidePromise
from tests.simulation.liveness import NOT_PROMISED, Liveness
from tests.simulation.machine import Machine
from tests.simulation.net import Network
from tests.simulation.setups import COORDINATOR, Setup
from tests.simulation.signatures import Signatures
from tests.simulation.tensors import GENESIS, Tensors, work_of

PAUSED_GRACES = 2.0  # as `swarm.rounds.group_driver`
FOUND_S = 0.5  # after which a peer that has started is found by the others
TAGS = {kind: str(kind.__struct_config__.tag) for kind in msg.Message.__args__}


class World:
    """All machines, the network between them, and what must always hold.

    `without`: numbers of faults (in the order of `faults.draw`) that do not happen, to shrink a failing schedule."""

    def __init__(self, setup: Setup, seed: int, without: Collection[int] = (), tracing: bool = False) -> None:
        self.setup, self.seed = setup, seed
        self.random = Random(f"{setup.name} {seed}")
        self.now, self.heals_at = 0.0, setup.faults_s
        self.steps = self.sends = 0
        self.covered: Counter[str] = Counter()
        self.timeline: list[str] = []
        self.tracing = tracing
        self.tensors = Tensors()
        self.work = work_of(setup)
        self.network = Network(Random(f"net {setup.name} {seed}"), self.heals_at)
        self.invariants, self.liveness = Invariants(self), Liveness(self)
        self.signatures = Signatures(self.invariants.signed)
        self._queue: list[tuple[float, int, Machine | None, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self.machines: dict[str, Machine] = {}
        self.asked_at = -1e9  # when the operator last said `peer regroup`
        self.last_words: dict[str, float] = {}
        """When peers lost their disks in the last fault: what they sent before decides nothing any more."""
        self.gone: set[str] = set()
        """Peers that nobody repairs any more."""
        self.liars: dict[str, liars.Liar] = {}
        for peer in (COORDINATOR, *setup.peers, *setup.joining):
            self.machines[peer] = machine = Machine(self, peer, self._config(peer))
            machine.train_s = self.random.choice((0.3, 0.5, 1.0)) * setup.pace
            if peer in setup.lying:
                self.liars[peer] = liars.draw(self, machine, self.random)
        self.faults = [*faults.draw(setup, self.random), *rare_faults.draw(setup, seed)]
        self.kept = [fault for index, fault in enumerate(self.faults) if index not in without]
        for fault in self.kept:
            self.at(fault.at, None, self._fault, fault)
        for peer in (COORDINATOR, *setup.peers):
            self.at(self.random.random(), None, self.restart, peer)
        if setup.coordinator_dies:
            self.at(self.heals_at, None, self._end_coordinator)

    def _config(self, peer: str) -> AgreementConfig:
        setup = self.setup
        return AgreementConfig(
            genesis=GENESIS,
            peer=peer,
            coordinator=COORDINATOR,
            credential=setup.invite_of(peer).encode(),
            mode=setup.mode,
            lone_survivor=setup.lone_survivor,
            rounds=setup.rounds,
            min_peers=setup.members,
            max_peers=setup.members + 4,
            attempt_s=1.5,
            finish_s=1.0,
            lost_s=4.0,
            stalled_s=12.0,
            undo_s=12.0,
            **({"roster_bytes": setup.roster_bytes} if setup.roster_bytes else {}),
        )

    # -- scheduler -----------------------------------------------------------------------------------------------------

    def at(self, time: float, machine: Machine | None, act: Callable[..., None], *args: Any) -> None:
        """Do this then, if the machine's present process still lives."""
        self._count += 1
        life = machine.life if machine is not None else 0
        heapq.heappush(self._queue, (time, self._count, machine, life, act, args))

    def run(self) -> World:
        """Run the schedule to its end, or as far as the promise goes. Raises `Broken`."""
        self.at(self.heals_at, None, self._heal)
        try:
            with self.ring():
                self.advance(self.heals_at + self.setup.calm_s)
        except OutsidePromise as error:
            self.covered[NOT_PROMISED] += 1
            self.note("", str(error))
            return self
        self.invariants.at_end()
        self.liveness.check()
        return self

    @contextmanager
    def ring(self) -> Iterator[None]:
        """Inside the block nodes keep as many links as the setup says. Of groups without liars, whose lies are told in
        whole proposals, every second one leaves rosters out, passes them on and packs messages as groups of many do."""
        kept = self.setup.links_kept or LINKS_KEPT
        few = DIRECT_MAX if self.setup.liars or self.setup.lying_joiners or self.seed % 2 else 0
        short = PACKED_MIN if few else 0
        with (
            patch.object(packing, "PACKED_MIN", short),
            patch.object(records, "LINKS_KEPT", kept),
            patch.object(attempt, "DIRECT_MAX", few),
            patch.object(leader, "DIRECT_MAX", few),
        ):
            yield

    def advance(self, until: float) -> None:
        """Do all that is due until that time, or until nothing more is of interest."""
        queue = self._queue
        while queue and queue[0][0] <= until:
            time, _, machine, life, act, args = heapq.heappop(queue)
            self.now = time
            if machine is not None:
                if machine.life != life:
                    continue
                if machine.frozen_until > time:
                    self.at(machine.frozen_until + 1e-4, machine, act, *args)
                    continue
            act(*args)
            if time > self.heals_at and self._is_over():
                return

    def _is_over(self) -> bool:
        """Return whether a schedule whose faults are over has shown what it is to show."""
        return self.liveness.is_reached()

    def _heal(self) -> None:
        self.network.cut.clear()
        self.note("healed", "")
        if self.setup.aftermath:
            left = self.liveness.left = aftermath.leave(self)
            self.covered[f"left {left.hope}"] += 1
            self.note("left", f"{' '.join(sorted(left.peers))}: {left.hope}")
        self.liveness.begin()

    def _fault(self, fault: faults.Fault) -> None:
        self.covered[f"fault {fault.kind}"] += 1
        self.note("FAULT", f"{fault.kind} {fault.args}")
        (rare_faults if fault.kind in rare_faults.KINDS else faults).apply(self, fault)

    # -- machines ------------------------------------------------------------------------------------------------------

    def restart(self, peer: str, declared: bool = False) -> None:
        """Start the process of a peer, if it does not run."""
        machine = self.machines[peer]
        if not machine.up and peer not in self.gone:
            self.note(peer, "starts, restored" if declared else "starts")
            machine.start(declared)

    def crash(self, machine: Machine, kind: str) -> None:
        """End the process of a machine; after a while the others suspect it."""
        if not machine.up or self.liveness.left is not None:
            return  # after the last fault even a crash that a frozen machine has still before it does not come
        self.covered[f"crash {kind}"] += 1
        self.note(machine.peer, f"CRASHES, disk {kind}")
        machine.stop(kind)
        if kind == "wiped":
            self.invariants.wiped(machine.peer)
        for other in sorted(self.machines):
            self.at(self.now + self.random.uniform(0.3, 3.0), None, self.suspect, other, machine.peer)

    def _end_coordinator(self) -> None:
        machine = self.machines[COORDINATOR]
        self.crash(machine, "kept")
        machine.start = lambda declared=False: None  # type: ignore[method-assign]

    def started(self, machine: Machine) -> None:
        """Introduce a machine and the others to each other: each finds the records of the rest."""
        for other in sorted(self.machines):
            if other != machine.peer and self.machines[other].up:
                self.at(self.now + self.random.random() * 0.3, machine, machine.step, events.PeerUp(other))
                self.at(self.now + FOUND_S, self.machines[other], self._find, self.machines[other], machine)

    def _find(self, machine: Machine, other: Machine) -> None:
        """Let a peer that looks for others find one that has started."""
        if self.reaches(other.peer, machine.peer):
            machine.suspects.discard(other.peer)
            machine.step(events.PeerUp(other.peer))

    def suspect(self, by: str, suspected: str, truly: bool = True) -> None:
        """Let one peer's failure detector suspect another (`truly`: only if bytes of it do not come now)."""
        observer = self.machines[by]
        if by == suspected or not observer.up or suspected in observer.suspects:
            return
        if truly and self.reaches(suspected, by):
            return
        observer.suspects.add(suspected)
        observer.step(events.PeerDown(suspected))

    def reaches(self, source: str, target: str) -> bool:
        """Whether bytes come from one peer to the other now."""
        machine = self.machines[source]
        return machine.up and machine.frozen_until <= self.now and not self.network.is_cut(source, target)

    # -- what machines do ----------------------------------------------------------------------------------------------

    def send(self, machine: Machine, target: str, message: msg.Message) -> None:
        """Send a message of a node; a liar says something else."""
        liar = self.liars.get(machine.peer)
        if liar is not None:
            liar.send(target, unpacked(message))
            return
        self.invariants.sent(machine, target, unpacked(message))
        if machine.paused and isinstance(message, msg.VoteMessage | msg.PromiseMessage):
            machine.later(PAUSED_GRACES * machine.config.grace_s, self.transmit, machine.peer, target, message)
            return
        self.transmit(machine.peer, target, message)

    def transmit(self, source: str, target: str, message: msg.Message) -> None:
        """Bring a message to its target, or not."""
        self.sends += 1
        receiver = self.machines.get(target)
        if receiver is None or self.network.is_cut(source, target):
            return
        for delay in self.network.delays(source, target, TAGS[type(unpacked(message))], self.now):
            self._count += 1
            # Not bound to the present process: messages outlive a restart of the receiver.
            heapq.heappush(
                self._queue,
                (self.now + delay, self._count, None, 0, self._receive, (receiver, source, message, self.now)),
            )

    def _receive(self, machine: Machine, source: str, message: msg.Message, sent_at: float) -> None:
        gone = self.network.has_parted(source, machine.peer) or sent_at <= self.last_words.get(source, -1.0)
        if not machine.up or gone:
            return  # what was on its way from a peer that is gone decides nothing any more: disks do
        if machine.frozen_until > self.now:
            self.at(machine.frozen_until + 1e-4, machine, self._receive, machine, source, message, sent_at)
            return
        self.covered[TAGS[type(message)]] += 1
        liar = self.liars.get(machine.peer)
        if liar is not None and not liar.hears(source, unpacked(message)):
            return
        if source in machine.suspects:
            machine.suspects.discard(source)
            machine.step(events.PeerUp(source))
        if machine.is_coordinator:
            self.invariants.coordinator_received(source, unpacked(message))
        machine.step(events.Received(source, message))

    def committed(self, machine: Machine, action: actions.CommitHead) -> None:
        head = action.head
        self.note(
            machine.peer, f"commits term {head.term} round {head.round} {names(head.hash)} after {names(head.previous)}"
        )
        if machine.is_honest:
            self.invariants.committed(machine, action)

    def told(self, machine: Machine, action: actions.Emit) -> None:
        self.covered[f"tell {action.event}"] += 1
        self.note(machine.peer, f"tells {action.event} {action.fields}")
        if machine.is_coordinator:
            self.liveness.told(action.event)

    def accused(self, machine: Machine, action: actions.Accuse) -> None:
        self.covered["accuse"] += 1
        self.note(machine.peer, f"accuses {action.peer}: {action.reason}")
        if machine.is_honest:
            self.invariants.accused(machine, action)

    def contribution(self, machine: Machine, body: Contribution) -> Contribution:
        """Return what a peer says it has computed."""
        liar = self.liars.get(machine.peer)
        return liar.contribution(body) if liar is not None else body

    def result(self, machine: Machine, key: bytes, index: int) -> bytes:
        """Return the name of an owner's result."""
        honest = self.tensors.merge(key, index)
        liar = self.liars.get(machine.peer)
        return liar.result(honest) if liar is not None else honest

    # -- what happened -------------------------------------------------------------------------------------------------

    def note(self, who: str, what: str) -> None:
        """Write a line of the timeline."""
        self.timeline.append(f"{self.now:7.2f} {who:>5} {what}")

    def trace(self, machine: Machine, event: events.Event, todo: list[actions.Action]) -> None:
        """Write all that a node took and did."""
        self.timeline.append(f"{self.now!r} {machine.peer} {event!r} -> {todo!r}")

    def broken(self, invariant: str, what: str) -> None:
        """Say that an invariant does not hold."""
        raise Broken(invariant, what)


def names(value: bytes | Signed) -> str:
    """Return a short name of a hash."""
    return value.hex()[:6] if isinstance(value, bytes) else value.signer
