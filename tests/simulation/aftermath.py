"""What is left of a group for ever: after its faults a schedule heals a random part, often just a quorum, and the rest
stays dead or cut off.

What that part can do is computed at once, from its disks alone and by the rules of the specification. The schedule then
has to show it: nothing is excused by how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import msgspec

from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement import records
from swarm.protocol.agreement.node import AgreementNode
from swarm.protocol.head import Head, Member
from tests.simulation.electorate import is_quorum, position
from tests.simulation.setups import COORDINATOR
from tests.simulation.tensors import GENESIS

if TYPE_CHECKING:
    from tests.simulation.machine import Machine
    from tests.simulation.world import World

Hope = Literal["alone", "operator", "lost", "open"]
"""What those that are left can do.

- `alone`: a quorum of the last head is among them, with its state: they go on, and no operator is needed.
- `operator`: they go on once the operator has begun a term with them.
- `lost`: no state is left: the coordinator tells the operator.
- `open`: nothing is promised, as where the coordinator is gone and no quorum is left."""

Record = TypeVar("Record", bound=msgspec.Struct)
WITNESS_REQUIRED: Final = Member(COORDINATOR, "coordinator")


@dataclass(frozen=True)
class Left:
    """Those that are healed, and what they can do."""

    peers: frozenset[str]
    hope: Hope


class Remains:
    """What one machine's disk says, with what is on its way there where the process lives."""

    def __init__(self, world: World, machine: Machine) -> None:
        image = machine.disk.synced.copy()
        for action in machine.disk.written if machine.up else ():
            image.write(action)
        self.peer, self.is_restored = machine.peer, bool(image.records.get(records.RESTORED_KEY))
        found = records.links_in(image.records)
        self.links = [record.link for record in found]
        self.head: Head = self.links[-1].head if found else GENESIS
        self.states = {*image.committed, image.voted} - {b""}
        if world.setup.has_genesis:
            self.states.add(GENESIS.state_hash)
        self.voter = self._voter(world, machine, image.records)
        ballot = _decoded(image.records, records.BALLOT_KEY, records.BallotRecord)
        self.accepted = ballot.accepted.value if ballot is not None and ballot.accepted is not None else None
        node = machine.node if machine.up else None
        self.term_ahead = node._chain.highest[0] if node is not None else 0  # where it goes once the state is here
        self.votes_ahead = _votes_ahead(node) if node is not None else set()

    def _voter(self, world: World, machine: Machine, kept: dict[str, bytes]) -> Member | None:
        """Return as whom this machine votes; None if it comes back as another one than anybody knows."""
        if not machine.is_coordinator:
            session = kept.get(records.IDENTITY_KEY)
            return Member(machine.peer, session.decode()) if session else None
        if world.setup.mode == "required":
            return WITNESS_REQUIRED
        return machine.node.me if machine.node is not None else None  # a witness ends with its process

    def knows_way(self, top: Remains) -> bool:
        """Return whether this one can follow the links that `top` keeps: from its own head, or from one that the
        coordinator has signed."""
        return self._steps_from(top) is not None or any(link.start or link.endorsement for link in top.links)

    def knows_way_for_long(self, top: Remains, kept: int) -> bool:
        """Return whether it can do so from its own head while `top`, which keeps so many links, makes half as many."""
        steps = self._steps_from(top)
        return bool(self.head.members) and steps is not None and steps <= kept // 2

    def _steps_from(self, top: Remains) -> int | None:
        """Return how many of the links that `top` keeps come after this one's head; None if it is on another way."""
        names = [top.links[0].head.previous if top.links else b"", *(link.head.hash for link in top.links)]
        return len(names) - 1 - names.index(self.head.hash) if self.head.hash in names else None


def _votes_ahead(node: AgreementNode) -> set[tuple[str, bytes]]:
    """Return whose votes after which heads wait in a process until it reaches these heads."""
    kept = node._early._kept.items()
    return {(peer, one.head_hash) for peer, mine in kept for one in mine if isinstance(one.message, msg.VoteMessage)}


def _decoded(kept: dict[str, bytes], key: str, type_: type[Record]) -> Record | None:
    return msgspec.msgpack.decode(kept[key], type=type_) if kept.get(key) else None


def leave(world: World) -> Left:
    """Let the rest be dead or cut off for ever, and heal the others. Return what they can do."""
    random = Random(f"aftermath {world.setup.name} {world.seed}")
    stay = _chosen(world, random)
    away = [peer for peer in sorted(world.machines) if peer not in stay]
    for peer in away:
        if random.random() < 0.5:
            world.crash(world.machines[peer], "kept")
        world.gone.add(peer)  # what is down now is never repaired
    world.network.away = frozenset(away)
    for peer in away:
        for other in sorted(stay):
            world.at(world.now + random.uniform(0.3, 3.0), None, world.suspect, other, peer)
    if not world.setup.has_genesis and random.random() < 0.4:
        for peer in sorted(stay - {COORDINATOR}):
            if random.random() < 0.7:
                _lose_disk(world, world.machines[peer])
    if world.setup.links_kept and COORDINATOR in stay and random.random() < 0.5:
        _lose_disk(world, world.machines[random.choice(sorted(stay - {COORDINATOR}))])  # it begins at an endorsement
    hope = judge(world, stay)
    for peer in sorted(stay):
        world.machines[peer].lives_left = None  # what was to end its process soon is a fault, too, and over
        world.at(world.now + random.random(), None, world.restart, peer)
    return Left(stay, hope)


def _lose_disk(world: World, machine: Machine) -> None:
    """Let a machine come back with another disk."""
    world.crash(machine, "wiped")
    world.last_words[machine.peer] = world.now
    machine.disk.crash("wiped", world.random)  # also where it was down already
    world.invariants.wiped(machine.peer)


def _chosen(world: World, random: Random) -> frozenset[str]:
    """Return a quorum in half of the cases, any part in a quarter, else all."""
    peers, draw = world.setup.peers, random.random()
    count = len(peers) // 2 + 1 if draw < 0.5 else random.randint(1, len(peers)) if draw < 0.75 else len(peers)
    chosen = set(random.sample(peers, count))
    chosen.update(peer for peer in world.setup.joining if random.random() < 0.5)
    if random.random() < 0.8:
        chosen.add(COORDINATOR)
    return frozenset(chosen)


def judge(world: World, stay: frozenset[str]) -> Hope:
    """Return what these can do, by what is on their disks."""
    setup = world.setup
    remains = {peer: Remains(world, world.machines[peer]) for peer in sorted(stay)}
    coordinator = remains.pop(COORDINATOR, None)
    lying = [peer for peer in remains if peer in setup.lying]
    honest = [r for peer, r in remains.items() if peer not in setup.lying]
    everybody = [*honest, *([coordinator] if coordinator is not None else [])]
    if not everybody:
        return "open"
    top = max(everybody, key=lambda r: position(r.head))
    if not top.head.members:
        waits = len(honest) >= setup.members and any(GENESIS.state_hash in r.states for r in honest)
        return "operator" if waits and coordinator is not None and not lying else "open"
    if any(not r.knows_way(top) for r in everybody if r.head.members):
        return "open"  # too many heads have passed since
    kept = setup.links_kept
    if coordinator is None and kept and any(not r.knows_way_for_long(top, kept) for r in everybody):
        return "open"  # what it begins at, as what the coordinator has signed, is soon kept no more
    if coordinator is None and _may_be_overtaken(world, top.head, honest):
        return "open"
    if _goes_on(world, top.head, honest, coordinator) and not lying:
        asks = coordinator is not None and world.machines[COORDINATOR].asks
        return "operator" if asks else "alone"  # the start that the operator has asked for may name those that are gone
    if coordinator is None or 0 < setup.rounds <= world.invariants.last_round:
        return "open"  # a coordinator that hears of the last round, also from a message on its way, calls no operator
    certified = {link.head.state_hash for r in everybody for link in r.links} | {GENESIS.state_hash}
    if any(r.states & certified for r in honest):
        return "operator"
    return "open" if lying else "lost"


def _goes_on(world: World, head: Head, honest: list[Remains], coordinator: Remains | None) -> bool:
    """Return whether a quorum of that head is left with its state, and of any value that may follow it already."""
    setup = world.setup
    if setup.mode == "required" and (coordinator is None or coordinator.is_restored):
        return False
    here = [*honest, *([coordinator] if coordinator is not None else [])]
    voters = {r.voter for r in here if r.voter is not None}
    if any(r.term_ahead > head.term for r in here):
        return False  # it knows of a start, and leaves this head for it
    peers = {r.peer for r in honest}
    if any(name == head.hash and peer not in peers for r in here for peer, name in r.votes_ahead):
        return False  # with this vote the witness may certify a state that is gone
    if any(learner.member.peer not in peers for learner in head.learners):
        return False  # it may become a member by what it has submitted, and is away
    values = [r.accepted for r in honest if r.accepted is not None and r.accepted.previous == head.hash]
    held = any(head.state_hash in r.states for r in honest)
    return held and all(is_quorum(setup, one, voters) for one in (head, *values))


def _may_be_overtaken(world: World, head: Head, honest: list[Remains]) -> bool:
    """Return whether that head is a start, and members that are not at it may commit a round after its base first: they
    stay there then, and those at the start wait for the next one, which only the coordinator can sign."""
    behind = {r.voter for r in honest if r.voter is not None and r.head.hash != head.hash}
    bases = [link.head for r in honest for link in r.links if link.head.hash == head.previous]
    return head.attempt < 0 and any(is_quorum(world.setup, base, behind) for base in bases)
