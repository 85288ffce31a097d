"""A group of agreement nodes under virtual time, with signatures from a table and states that are names."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import msgspec
from blake3 import blake3

from optim.config import DilocoConfig
from peer.config import InnerConfig
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.node import AgreementNode
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.packing import unpacked
from swarm.protocol.agreement.round.instance import name_build
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.agreement.work import Work
from swarm.protocol.head import Head, Member, Sponsor, genesis
from swarm.protocol.ledger import Range, count
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution, WorkPlan
from swarm.protocol.round_schedule import RoundSchedule

Body = TypeVar("Body", bound=msgspec.Struct)
GENESIS = genesis("run", blake3(b"genesis").digest())
SCHEDULE = RoundSchedule(
    DilocoConfig(steps=4), InnerConfig(lr=1e-2, batch_size=2, total_steps=1000), seq_len=8, compute_s_max=30.0
)


def sponsors_of(join: msg.JoinBody, signer: str) -> tuple[Sponsor, ...] | None:
    """Take what a credential says: "forged", or the name of an invite that brings in one peer."""
    name = join.credential.decode()
    return None if name == "forged" else (Sponsor(name, 1),) if name else ()


SLICES = 4
WORK = Work(SCHEDULE, lambda head: SLICES, lambda head: 4.0, sponsors=sponsors_of)
COORDINATOR = "W"


class SignatureTable:
    """All bodies that were ever signed. `of(peer)` signs for one peer."""

    def __init__(self) -> None:
        self.signed: set[tuple[str, str, bytes]] = set()

    def of(self, peer: str) -> TableSigner:
        return TableSigner(self, peer)


class TableSigner:
    """Signs by an entry in the table."""

    def __init__(self, table: SignatureTable, peer: str) -> None:
        self._table, self._peer = table, peer

    def sign(self, kind: str, body: msgspec.Struct) -> Signed:
        encoded = encode(body)
        self._table.signed.add((self._peer, kind, encoded))
        return Signed(encoded, self._peer, b"")

    def open(self, signed: Signed, kind: str, type_: type[Body]) -> Body:
        if (signed.signer, kind, signed.body) not in self._table.signed:
            raise ProtocolViolation("a signature is wrong")
        try:
            return msgspec.msgpack.decode(signed.body, type=type_)
        except msgspec.ValidationError as error:
            raise ProtocolViolation("a body is malformed") from error


def session_of(peer: str, life: int) -> str:
    """Return the name of a peer's process."""
    return f"{peer}{life}"


def next_state(state: bytes, results: tuple[bytes, ...]) -> bytes:
    return blake3(b"next" + state + b"".join(results)).digest()


def contribution_body(
    member: Member, plan: WorkPlan, counted: tuple[Range, ...] | None = None, slices: int = SLICES
) -> Contribution:
    """Return what a member contributes to a plan that names it: all that it was assigned, or in a pipeline the
    samples `counted`, as micro-batches of 4."""
    mine = plan.of(member)
    assert mine is not None
    samples = mine.steps * SCHEDULE.unit if counted is None else count(counted)
    steps = mine.steps if counted is None else samples // 4
    slices = slices if steps else 0
    return Contribution(
        head=plan.head,
        plan=plan.hash,
        member=member,
        steps=steps,
        samples=samples,
        loss=1.0,
        hashes=tuple(blake3(f"{member}{i}".encode() + encode(plan)).digest() for i in range(slices)),
        sqnorms=(1.0,) * slices,
        counted=counted or (),
    )


def plan_in(signed: Signed) -> WorkPlan:
    """Return the plan that a leader has signed."""
    return msgspec.msgpack.decode(signed.body, type=WorkPlan)


@dataclass
class Machine:
    """One peer's machine: disk, states, and what its driver is doing."""

    peer: str
    node: AgreementNode
    records: dict[str, bytes] = field(default_factory=dict)
    stored_states: set[bytes] = field(default_factory=set)
    committed: list[Head] = field(default_factory=list)
    told: list[actions.Emit] = field(default_factory=list)
    accused: list[actions.Accuse] = field(default_factory=list)
    timers: dict[str, float] = field(default_factory=dict)
    has: set[bytes] = field(default_factory=set)
    up: bool = True
    frozen_until: float = 0.0
    disk_free_at: float = 0.0
    life: int = 0


class GroupOfNodes:
    """Nodes, their network, disks and clocks. `lost(source, target, message)` says which messages are lost."""

    table_type: type[SignatureTable] = SignatureTable
    session_of: Callable[[str, int], str] = staticmethod(session_of)

    def __init__(self, peers: Sequence[str] = "ABC", train_s: float = 1.0, work: Work = WORK, **config: Any) -> None:
        self.now = 0.0
        self.table = self.table_type()
        self.train_s, self.work = train_s, work
        self.machines: dict[str, Machine] = {}
        self.lost: Callable[[str, str, msg.Message], bool] = lambda source, target, message: False
        self.change: Callable[[str, msg.Message], msg.Message] = lambda source, message: message
        self.merge: Callable[[str, bytes, int], bytes] = lambda peer, key, index: blake3(key + bytes([index])).digest()
        self.received: Callable[[str, bytes], bytes] = lambda peer, name: name
        """What a peer receives from the owner that has signed for that slice."""
        self.build: Callable[[str, bytes], tuple[float, bytes | None]] = lambda peer, state: (0.05, state)
        self.counted: Callable[[str, WorkPlan], tuple[Range, ...]] | None = None
        """What a peer has counted under a plan, in a pipeline."""
        self.write_s, self.delay_s, self.merge_s, self.fetch_s = 0.001, 0.01, 0.05, 0.3
        self.serves = True  # whether any state can be fetched
        self.sent: list[tuple[str, str, msg.Message]] = []
        self.fetches: list[str] = []
        """The peers that have asked for a state."""
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0
        defaults: dict[str, Any] = {
            "genesis": GENESIS,
            "coordinator": COORDINATOR,
            "min_peers": len(peers),
            "stalled_s": 60.0,
            "undo_s": 60.0,
            "finish_s": 0.5,
        }
        self._config = defaults | config
        for peer in [COORDINATOR, *peers]:
            self.start(peer)

    # -- machines ------------------------------------------------------------------------------------------------------

    def start(self, peer: str, wiped: bool = False, **started: Any) -> Machine:
        """Start the process of a peer, on its disk."""
        config = AgreementConfig(peer=peer, **{"finish_s": 0.5, **self._config})
        node = AgreementNode(config, self.table.of(peer), self.work)
        old = self.machines.get(peer)
        machine = Machine(peer, node)
        if old is not None and not wiped:
            machine.records, machine.stored_states = dict(old.records), set(old.stored_states)
            machine.committed = old.committed
        machine.life = old.life + 1 if old is not None else 0
        machine.stored_states.add(GENESIS.state_hash)
        machine.has = set(machine.stored_states)
        self.machines[peer] = machine
        seed = blake3(f"{peer}{machine.life}".encode()).digest()
        session = self.session_of(peer, machine.life)
        states = tuple(sorted(machine.stored_states))
        self.event(peer, events.Started(dict(machine.records), states, session, seed, **started))
        return machine

    def crash(self, peer: str) -> None:
        self.machines[peer].up = False

    def event(self, peer: str, event: events.Event) -> None:
        """Give a node an event now, and carry out its actions."""
        machine = self.machines[peer]
        for action in machine.node.step(self.now, event):
            self._do(machine, action)

    def later(self, seconds: float, peer: str, event: events.Event) -> None:
        machine = self.machines[peer]
        life = machine.life

        def act() -> None:
            if machine.frozen_until > self.now:
                self.at(machine.frozen_until, act)
            elif self.machines[peer].up and self.machines[peer].life == life:
                self.event(peer, event)

        self.at(self.now + seconds, act)

    def at(self, time: float, act: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._queue, (time, self._count, act))

    def run(self, seconds: float, until: Callable[[], bool] = lambda: False) -> None:
        """Let virtual time pass, until the condition holds."""
        end = self.now + seconds
        while self._queue and self._queue[0][0] <= end and not until():
            self.now, _, act = heapq.heappop(self._queue)
            act()
        if not until():
            self.now = end

    # -- actions -------------------------------------------------------------------------------------------------------

    def _build_ahead(self, machine: Machine, roster: OpenedRoster) -> None:
        """Build what the owners send to members and contributors, if all of them live until then."""
        head, me, owners = machine.node.head, machine.node.me, [owner.peer for owner in roster.owners]
        if not head.has(me) and all(body.member != me for body in roster.contributions):
            return
        merged = (self.merge(owner, roster.key, index) for index, owner in enumerate(owners))
        results = tuple(self.received(machine.peer, name) for name in merged)

        def act() -> None:
            live = all(owner in self.machines and self.machines[owner].up for owner in owners)
            if machine is self.machines[machine.peer] and machine.up and live and machine.node.head == head:
                self._build(machine, roster, name_build(roster.key, results), results)

        self.at(self.now + self.delay_s + self.merge_s, act)

    def _build(self, machine: Machine, roster: OpenedRoster, name: bytes, results: tuple[bytes, ...]) -> None:
        seconds, built = self.build(machine.peer, next_state(machine.node.head.state_hash, results))
        machine.has |= {built} if built is not None else set()
        self.later(seconds, machine.peer, events.Built(roster.key, name, built))

    def _do(self, machine: Machine, action: actions.Action) -> None:
        peer = machine.peer
        match action:
            case actions.Send(target, message):
                said = unpacked(message)
                changed = self.change(peer, said)
                message = message if changed is said else changed
                self.sent.append((peer, target, changed))
                if target in self.machines and not self.lost(peer, target, changed):
                    self.later(self.delay_s, target, events.Received(peer, message))
            case actions.SetTimer(id, at):
                machine.timers[id] = at
                self.later(max(0.0, at - self.now) + 1e-6, peer, events.TimerFired(id))
            case actions.Persist(id, key, record, state):
                assert not state or state in machine.has, f"{peer} writes of a state that it has not"
                self._write(machine, id, key, record, state)
            case actions.Train(plan, finish_early):
                self.later(
                    0.05 if finish_early else self.train_s, peer, events.Submitted(self.contribution(machine, plan))
                )
            case actions.MergeSlices(roster):
                for index in roster.parts.get(machine.node.me, ()):
                    name = self.merge(peer, roster.key, index)
                    self.later(self.merge_s, peer, events.SliceResult(roster.key, index, name))
                self._build_ahead(machine, roster)
            case actions.Build(name=name, roster=roster, results=results):
                self._build(machine, roster, name, results)
            case actions.Fetch(state_hash=state_hash, holders=holders):
                self.fetches.append(peer)
                here = self.serves and any(self._serves(holder, peer, state_hash) for holder in holders)
                if here:
                    machine.has.add(state_hash)
                self.later(self.fetch_s, peer, events.StateFetched(state_hash, here))
            case actions.CommitHead(head=head):
                if peer != COORDINATOR:
                    assert head.state_hash in machine.has, f"{peer} stands at a head without its state"
                machine.committed.append(head)
            case actions.Emit():
                machine.told.append(action)
            case actions.Accuse():
                machine.accused.append(action)
            case _:
                pass

    def _write(self, machine: Machine, id: int, key: str, record: bytes, state: bytes) -> None:
        """Write in order; a crash before the end loses the record and what comes after it."""
        life = machine.life
        machine.disk_free_at = max(machine.disk_free_at, self.now) + self.write_s

        def written() -> None:
            if machine.up and self.machines[machine.peer] is machine and machine.life == life:
                machine.records[key] = record
                machine.stored_states |= {state} if state else set()
                self.event(machine.peer, events.Persisted(id))

        self.at(machine.disk_free_at, written)

    def _serves(self, holder: str, peer: str, state_hash: bytes) -> bool:
        machine = self.machines.get(holder)
        reached = not self.lost(holder, peer, msg.AskChainMessage(()))
        return machine is not None and machine.up and reached and state_hash in machine.has

    def contribution(self, machine: Machine, plan: WorkPlan) -> Signed:
        counted = self.counted(machine.peer, plan) if self.counted is not None else None
        body = contribution_body(machine.node.me, plan, counted)
        return self.table.of(machine.peer).sign(CONTRIBUTION_KIND, body)

    def run_to(self, round: int, peers: Sequence[str] = "", seconds: float = 120.0) -> None:
        """Run until these peers (all but the coordinator) have committed that round, and check the history."""
        wanted = peers or [peer for peer in self.machines if peer != COORDINATOR]
        self.run(seconds, lambda: all(self.round(peer) >= round for peer in wanted))
        assert all(self.round(peer) >= round for peer in wanted), {peer: self.round(peer) for peer in self.machines}
        self.run(0.003)  # what was written is now on disk
        self.check()

    def run_until_sent(self, kind: type[Any], seconds: float = 60.0) -> tuple[str, str, Any]:
        """Run until a message of that kind is sent; return (source, target, message)."""
        first = len(self.sent)
        self.run(seconds, lambda: any(isinstance(message, kind) for _, _, message in self.sent[first:]))
        return next(entry for entry in self.sent[first:] if isinstance(entry[2], kind))

    def give(self, target: str, message: msg.Message, source: str) -> list[actions.Action]:
        """Give a node a message now; return its actions without carrying them out."""
        return self.machines[target].node.step(self.now, events.Received(source, message))

    def isolate(self, *peers: str) -> None:
        """Lose all messages between these peers and the others."""
        self.lost = lambda source, target, message: (source in peers) != (target in peers)

    def heal(self) -> None:
        self.lost = lambda source, target, message: False

    def lose_leader_after_votes(self) -> tuple[str, str, str, msg.ProposalMessage]:
        """Of A, B and C, run until a leader and one member have voted while no vote is heard, and crash the leader.
        Return it, the voter, the third member and the proposal, whose value is chosen although no peer knows it."""
        first: list[tuple[str, str]] = []  # the one leader and member between whom a proposal passes

        def lost(source: str, target: str, message: msg.Message) -> bool:
            if isinstance(message, msg.ProposalMessage):
                first.extend([(source, target)] if not first else [])
                return (source, target) != first[0]
            return isinstance(message, msg.VoteMessage | msg.ChainMessage)

        self.lost = lost
        leader, voter, message = self.run_until_sent(msg.ProposalMessage)
        (third,) = set("ABC") - {leader, voter}
        node = self.machines[voter].node
        before = node.head
        self.run(5.0, lambda: node._round.instance.accepted is not None)
        self.run(0.01)
        assert node._round.instance.accepted is not None and node.head == before
        self.crash(leader)
        return leader, voter, third, message

    # -- what tests look at --------------------------------------------------------------------------------------------

    def head(self, peer: str) -> Head:
        return self.machines[peer].node.head

    def round(self, peer: str) -> int:
        return self.head(peer).round

    def told(self, peer: str, event: str) -> list[dict[str, Any]]:
        return [tell.fields for tell in self.machines[peer].told if tell.event == event]

    def accusations(self) -> list[tuple[str, str, str]]:
        return [(m.peer, a.peer, a.reason) for m in self.machines.values() for a in m.accused]

    def member(self, peer: str) -> Member:
        return self.machines[peer].node.me

    def sign(self, peer: str, kind: str, body: msgspec.Struct) -> Signed:
        return self.table.of(peer).sign(kind, body)

    def vote(self, peer: str, head: Head, attempt: int, value: Head) -> Signed:
        """Return a vote of that peer, which may be a liar's."""
        return self.sign(peer, evidence.VOTE, msg.VoteBody(head.hash, attempt, value.hash, self.member(peer)))

    def check(self) -> None:
        """Raise unless all that was committed is one history for each start, and no honest peer was accused."""
        after: dict[tuple[bytes, int, int], set[bytes]] = {}
        for machine in self.machines.values():
            for head in machine.committed:
                after.setdefault((head.previous, head.term, head.boot), set()).add(head.hash)
        assert all(len(found) == 1 for found in after.values()), "two histories"
