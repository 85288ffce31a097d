"""What must hold in every schedule, checked as it goes. The numbers are those of the specification.

Nothing here asks the core: quorums, ledgers and electorates are judged by rules of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Final

import msgspec

from peer.identity import Signed
from swarm.protocol.agreement import actions
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.records import BALLOT_KEY, BallotRecord, LinkRecord
from swarm.protocol.agreement.rules.evidence import START
from swarm.protocol.head import Head, Member
from tests.simulation import electorate
from tests.simulation.electorate import Position, is_quorum, position
from tests.simulation.setups import COORDINATOR
from tests.simulation.tensors import GENESIS

if TYPE_CHECKING:
    from tests.simulation.machine import Machine
    from tests.simulation.world import World

ANSWERED_S: Final = 10.0  # after which a start no more follows the operator's word
SENDS_PER_S: Final = 60  # and peer of the run: at most, at one node
LATELY: Final = 8  # heads that tell whether a group had many members
MANY: Final = 3  # members
TOLD_KEPT: Final = 8  # of the coordinator's questions, and of the starts that it has signed


class Broken(AssertionError):
    """An invariant that does not hold."""

    def __init__(self, invariant: str, what: str) -> None:
        super().__init__(f"{invariant}: {what}")
        self.invariant = invariant


class OutsidePromise(Exception):
    """What happens from here on is not promised."""


class Invariants:
    """All that is remembered of one schedule to judge the next event."""

    def __init__(self, world: World) -> None:
        self._world, self._setup = world, world.setup
        self.heads: dict[bytes, Head] = {GENESIS.hash: GENESIS}
        """Heads at which an honest node has stood."""
        self.values: dict[bytes, Head] = {GENESIS.hash: GENESIS}
        """These, and all that honest leaders have proposed and the coordinator has started."""
        self._after: dict[bytes, bytes] = {}
        self._at: dict[Position, bytes] = {}
        self._starts: dict[tuple[int, int], bytes] = {}
        self._undone: set[bytes] = set()
        self._highest: dict[str, Position] = {}
        self._votes: dict[tuple[Member, bytes, int], bytes] = {}
        self._promised: dict[tuple[Member, bytes], int] = {}
        self._last_vote: dict[tuple[Member, bytes], tuple[int, bytes]] = {}
        self._stands: dict[str, Head] = {}
        self._told: dict[str, dict[str, msg.ReportMessage]] = {}
        self._known: dict[bytes, tuple[bytes, ...]] = {}
        """By start, the values that its signer knew of then: what it stood at and had been told. What it is told while
        the start is on its way to its disk comes too late, and the members know better."""
        self._records: dict[bytes, msgspec.Struct] = {}
        self._sends: dict[str, int] = {}

    # -- what nodes say ------------------------------------------------------------------------------------------------

    def sent(self, machine: Machine, target: str, message: msg.Message) -> None:
        """Judge a message of an honest node."""
        self._sends[machine.peer] = self._sends.get(machine.peer, 0) + 1
        judge = self._JUDGES.get(type(message))
        if judge is not None:
            judge(self, machine, message)

    def _vote(self, machine: Machine, message: msg.VoteMessage) -> None:
        body = self._world.signatures.open(message.vote, "agreement.vote", msg.VoteBody)
        if self._cast_once(machine, body):
            if not machine.is_coordinator:
                self._require_on_disk(machine, body)
            self._last_vote[body.voter, body.head] = (body.attempt, body.value)

    def _cast_once(self, machine: Machine, body: msg.VoteBody) -> bool:
        """Return whether the vote is new; it must not contradict an earlier one or a promise."""
        key = (body.voter, body.head, body.attempt)
        known = self._votes.setdefault(key, body.value)
        if known != body.value and not self._has_forgotten(machine):
            raise Broken("6 votes", f"{body.voter} votes twice in attempt {body.attempt}")
        if known is not body.value:
            return False
        if body.attempt < self._promised.get((body.voter, body.head), -1) and not self._has_forgotten(machine):
            raise Broken("6 votes", f"{body.voter} votes below its promise")
        return True

    def _promise(self, machine: Machine, message: msg.PromiseMessage) -> None:
        body = self._world.signatures.open(message.promise, "agreement.promise", msg.PromiseBody)
        key = (body.voter, body.head)
        if self._promised.get(key, -1) >= body.attempt:
            return
        self._promised[key] = body.attempt
        head = self.heads.get(body.head)
        if self._has_forgotten(machine) or head is None or body.voter not in electorate.voters(self._setup, head):
            return
        voted = self._last_vote.get(key)
        accepted = body.accepted
        reported = (accepted.attempt, accepted.value.hash) if accepted is not None else None
        if voted is not None and (reported is None or reported[0] < voted[0]):
            raise Broken("6 votes", f"{body.voter} promises attempt {body.attempt} and hides its vote in {voted[0]}")
        if not machine.is_coordinator:
            ballot = self._ballot(machine, body.head)
            if self._has_left(machine, body.head):
                return
            if ballot is None or ballot.ballot.promised < body.attempt:
                raise Broken("6 votes", f"{machine.peer} promises before that is on disk")

    def _proposal(self, machine: Machine, message: msg.ProposalMessage) -> None:
        self.values.setdefault(message.value.hash, message.value)

    def _chain(self, machine: Machine, message: msg.ChainMessage) -> None:
        for link in message.links:
            if link.start is not None:
                self._signed_start(link.start)

    _JUDGES: ClassVar[dict[type[msgspec.Struct], Callable[..., None]]] = {
        msg.VoteMessage: _vote,
        msg.PromiseMessage: _promise,
        msg.ProposalMessage: _proposal,
        msg.ChainMessage: _chain,
    }

    # -- disks ---------------------------------------------------------------------------------------------------------

    def _require_on_disk(self, machine: Machine, body: msg.VoteBody) -> None:
        """Invariant 7: what was voted for, and the state that it names, survive this voter's process."""
        if self._has_left(machine, body.head):
            return
        ballot = self._ballot(machine, body.head)
        accepted = ballot.accepted if ballot is not None else None
        if accepted is not None and accepted.attempt > body.attempt:
            return  # a later vote has reached the disk meanwhile, and counts instead
        if accepted is None or (accepted.attempt, accepted.value.hash) != (body.attempt, body.value):
            raise Broken("7 durability", f"{machine.peer} votes before that is on disk")
        self.values.setdefault(body.value, accepted.value)
        if not machine.disk.synced.holds(accepted.value.state_hash):
            raise Broken("7 durability", f"{machine.peer} votes for a state that its disk cannot bring back")

    def _has_left(self, machine: Machine, head_hash: bytes) -> bool:
        """Return whether the disk says that this node stands beyond that head: what it said there is settled."""
        head, link = self.heads.get(head_hash), machine.disk.synced.link
        if head is None or not link:
            return False
        record = self._decoded(link, LinkRecord)
        return isinstance(record, LinkRecord) and position(record.link.head) > position(head)

    def _ballot(self, machine: Machine, head_hash: bytes) -> BallotRecord | None:
        record = machine.disk.synced.records.get(BALLOT_KEY)
        if record is None:
            return None
        found = self._decoded(record, BallotRecord)
        return found if isinstance(found, BallotRecord) and found.head == head_hash else None

    def _decoded(self, record: bytes, type_: type[msgspec.Struct]) -> msgspec.Struct:
        if record not in self._records:
            self._records[record] = msgspec.msgpack.decode(record, type=type_)
        return self._records[record]

    # -- starts --------------------------------------------------------------------------------------------------------

    def coordinator_received(self, source: str, message: msg.Message) -> None:
        """Note what peers that answered the coordinator stand at and have voted for."""
        if not isinstance(message, msg.ReportMessage):
            return
        if message.accepted is not None:  # a start may follow it, since it may have been chosen, even if a liar says so
            self.values.setdefault(message.accepted.value.hash, message.accepted.value)
        if source not in self._setup.lying:
            self._told.setdefault(message.nonce, {})[source] = message

    def signed(self, peer: str, kind: str, encoded: bytes) -> None:
        """Note what the coordinator knows while it signs a start."""
        if peer != COORDINATOR or kind != START:
            return
        nonce = next(reversed(self._told), None)
        told = list(self._told[nonce].values()) if nonce is not None else []
        names = [report.head for report in told]
        names += [report.accepted.value.hash for report in told if report.accepted is not None]
        names += [self._stands[COORDINATOR].hash] if COORDINATOR in self._stands else []
        self._known[encoded] = tuple(names)

    def _signed_start(self, start: Signed) -> None:
        body = self._world.signatures.open(start, START, msg.StartBody)
        head, name = body.head, body.head.hash
        known = self._starts.setdefault((head.term, head.boot), name)
        if known != name:
            raise Broken("2 lineage", f"two starts of term {head.term}")
        if name in self.values:
            return
        self.values[name] = head
        self._undone.update(body.undoes)
        if len(body.undoes) == msg.LINKS_MAX:  # a list has no room for more, and names the newest
            self._undone.update(name for name, one in self.heads.items() if one.round > head.round)
        peers = [member.peer for member in head.members]
        if len(set(peers)) != len(peers) or COORDINATOR in peers:
            raise Broken("10 electorate", f"the start of term {head.term} has the members {peers}")
        if head.previous not in self.values:
            self._passed_by(self._world.machines[COORDINATOR], head)
        if self._setup.lying.issuperset(peers) and self._setup.lies:
            self._begun_with_liars(head)
        if self._setup.mode == "witness" and self._setup.lying.issuperset(peers):
            raise OutsidePromise(f"only liars have answered the operator who began term {head.term}")
        base = self.values[head.previous]
        if (base.state_hash, base.ledger, base.round) != (head.state_hash, head.ledger, head.round):
            raise Broken("2 lineage", f"the start of term {head.term} changes the state of its base")
        coordinator = self._world.machines[COORDINATOR]
        if self._setup.mode == "required":
            if not self._has_forgotten(coordinator):
                kept = self._setup.links_kept or len(self.heads)  # of more the signer knows nothing
                for other in list(self.heads.values())[-kept:]:
                    self._require_kept(other, head, name)
            return
        if self._has_forgotten(coordinator):
            return
        for known_head in (self.heads[known] for known in self._known.get(start.body, ()) if known in self.heads):
            self._require_kept(known_head, head, name)

    def _has_forgotten(self, machine: Machine) -> bool:
        """Return whether a machine's disk was put back, and nobody need be there that knows what it has forgotten."""
        return machine.restored and self._setup.restores != "undeclared"

    def _begun_with_liars(self, head: Head) -> None:
        """Judge a term with liars only, who choose all weights from here on: no coordinator begins one by itself. If
        they were the whole group before, nothing is given away; of two members one may go on, whichever it is."""
        base = self.values[head.previous]
        before = {member.peer for member in base.members}
        if self._setup.lying >= before:
            return
        if max(len(one.members) for one in self._lately(base)) < MANY:
            return
        if self._world.now - self._world.asked_at > ANSWERED_S:
            raise Broken("5 weights", f"term {head.term} begins with liars only, and no operator has said so")

    def _lately(self, head: Head) -> list[Head]:
        """Return a head and those before it whose members a start may take in."""
        found = [head]
        while len(found) < LATELY and found[-1].previous in self.values:
            found.append(self.values[found[-1].previous])
        return found

    def _require_kept(self, committed: Head, start: Head, name: bytes) -> None:
        """Raise if a start takes back a commit silently."""
        if (committed.term, committed.boot) >= (start.term, start.boot) or committed.attempt < 0:
            return
        if committed.hash not in self._undone and not self._descends(name, committed.hash):
            raise Broken(
                "3 one commit a round",
                f"the start of term {start.term} silently undoes round {committed.round} of term {committed.term}",
            )

    def _descends(self, name: bytes, ancestor: bytes) -> bool:
        while name in self.values:
            if name == ancestor:
                return True
            name = self.values[name].previous
        return False

    @property
    def last_round(self) -> int:
        """The last that was committed, or that an honest peer has voted for: its commit may be on its way."""
        voted = (self.values[name] for name in self._votes.values() if name in self.values)
        return max(head.round for head in (*self.heads.values(), *voted))

    # -- commits -------------------------------------------------------------------------------------------------------

    def committed(self, machine: Machine, action: actions.CommitHead) -> None:
        """Judge the commit of an honest node."""
        head, name, link = action.head, action.head.hash, action.certificate
        if link.head != head:
            raise Broken("4 monotone", f"{machine.peer} commits a head with the certificate of another one")
        if not machine.is_coordinator and not machine.has(head.state_hash):
            raise Broken("5 weights", f"{machine.peer} stands at round {head.round} without its state")
        if self._highest.get(machine.peer, (-1, 0, 0)) >= position(head) and not machine.restored:
            raise Broken("4 monotone", f"{machine.peer} goes back to {position(head)}")
        self._highest[machine.peer] = position(head)
        record = self._decoded(machine.disk.synced.link, LinkRecord) if machine.disk.synced.link else None
        if not isinstance(record, LinkRecord) or position(record.link.head) < position(head):
            raise Broken("7 durability", f"{machine.peer} commits before that is on disk")
        if name not in self.heads:
            self._first(machine, head, name, link)
        if not machine.is_coordinator and not machine.restored:
            self._require_known(machine, head, name)
        self._stands[machine.peer] = head

    def _require_known(self, machine: Machine, start: Head, name: bytes) -> None:
        """Raise if a member leaves a round behind for a start whose signer did not know of it, before that term has
        ended a round. It may leave it for a start of a later round, as it may for any branch that has gone further."""
        left = self._stands.get(machine.peer)
        while left is not None and left.attempt < 0:  # a start over its last round
            left = self.heads.get(left.previous)
        if left is None or start.attempt >= 0 or start.round > left.round or left.hash in self._undone:
            return
        if self._descends(name, left.hash):
            return
        if not any(head.previous == name and head.attempt >= 0 for head in self.heads.values()):
            raise Broken("3 one commit a round", f"{machine.peer} leaves round {left.round} for a start that missed it")

    def _first(self, machine: Machine, head: Head, name: bytes, link: msg.ChainLink) -> None:
        if head.attempt >= 0 and head.previous not in self.heads:
            self._passed_by(machine, head)
        if link.start is not None:  # before its head is a known value, since its signer stands there before it shows it
            self._signed_start(link.start)
        self.heads[name] = self.values[name] = head
        electorate.require_certificate(self, self._setup, self._world.signatures, link)
        content = self._world.tensors.states.get(head.state_hash)
        if content is None or content.doubled or content.samples != electorate.trained(head.ledger):
            raise Broken("9 counted once", f"the ledger of round {head.round} is not what its state contains")
        if head.attempt < 0:
            self._started(head, link)
            return
        before = self.heads[head.previous]
        other = self._after.setdefault(head.previous, name)
        if other != name or self._at.setdefault(position(head), name) != name:
            raise Broken("1 agreement", f"two commits of round {head.round} in term {head.term}")
        electorate.require_earned(self._setup, self._world.signatures, before, head)
        electorate.require_whole_batch(self._setup, self._world.tensors, before, head)
        electorate.require_forged_by_owners(self._setup, self._world.tensors, before, head)
        if self._setup.rounds and head.round > self._setup.rounds:
            raise Broken("2 lineage", f"round {head.round} of a run with {self._setup.rounds}")
        if self._setup.mode == "required" and not self._has_forgotten(self._world.machines[COORDINATOR]):
            for start in self._starts.values():
                self._require_kept(head, self.values[start], start)

    def _passed_by(self, machine: Machine, head: Head) -> None:
        """Judge a head at which no honest node has stood: the first one there was behind, and went past it."""
        passed = machine.node._chain.link(head.previous) if machine.node is not None else None
        if passed is None:
            raise Broken("2 lineage", f"{position(head)} follows a head that {machine.peer} cannot prove")
        self._first(machine, passed.head, head.previous, passed)

    def _started(self, head: Head, link: msg.ChainLink) -> None:
        if link.start is None:
            raise Broken("2 lineage", f"term {head.term} begins without the coordinator")
        if head.previous not in self.values:
            raise Broken("2 lineage", f"the start of term {head.term} follows no head")

    # -- the rest ------------------------------------------------------------------------------------------------------

    def accused(self, machine: Machine, action: actions.Accuse) -> None:
        """Judge an accusation by an honest node."""
        culprit = self._world.machines.get(action.peer)
        if culprit is None or (culprit.is_honest and not self._has_forgotten(culprit)):
            raise Broken("12 honest is never penalized", f"{machine.peer} accuses {action.peer}: {action.reason}")

    def wiped(self, peer: str) -> None:
        """A machine has another disk: it may begin again."""
        self._highest.pop(peer, None)
        self._stands.pop(peer, None)

    def put_back(self, machine: Machine) -> None:
        """The coordinator has an old disk. A start that neither that nor another machine knows is nobody's any more: it
        counts again if a message that is still on its way brings it to one."""
        self._stands.pop(machine.peer, None)
        for at, name in list(self._starts.items()) if machine.is_coordinator else ():
            if not any(one.knows(name) for one in self._world.machines.values()):
                del self._starts[at]
                self.heads.pop(name, None)
                self.values.pop(name, None)

    def forget(self, newest: int) -> None:
        """Forget all but so many of the newest heads, so that long schedules stay small. What would follow a forgotten
        head counts as broken; an old disk never is that old."""
        kept = {GENESIS.hash, *list(self.heads)[-newest:]}
        values = kept | set(list(self.values)[-2 * newest :])
        self.heads = {name: head for name, head in self.heads.items() if name in kept}
        self.values = {name: head for name, head in self.values.items() if name in values}
        self._after = {name: after for name, after in self._after.items() if name in kept}
        self._at = {at: name for at, name in self._at.items() if name in kept}
        self._starts = {at: name for at, name in self._starts.items() if name in values}
        self._votes = {vote: value for vote, value in self._votes.items() if vote[1] in kept}
        self._promised = {key: attempt for key, attempt in self._promised.items() if key[1] in kept}
        self._last_vote = {key: vote for key, vote in self._last_vote.items() if key[1] in kept}
        self._told = {nonce: self._told[nonce] for nonce in list(self._told)[-TOLD_KEPT:]}
        self._known = {start: self._known[start] for start in list(self._known)[-TOLD_KEPT:]}
        self._records.clear()

    def at_end(self) -> None:
        """Judge how much was sent."""
        world = self._world
        most = (20.0 + world.now) * SENDS_PER_S * len(world.machines)
        for peer, count in self._sends.items():
            if count > most:
                raise Broken("14 bounds", f"{peer} sent {count} messages in {world.now:.0f} s")

    def is_quorum(self, head: Head, voters: set[Member]) -> bool:
        return is_quorum(self._setup, head, voters)
