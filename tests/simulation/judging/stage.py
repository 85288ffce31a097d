"""A world in which nothing happens by itself: histories are made by hand, and the real judge is shown them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, Final

from blake3 import blake3
from msgspec.structs import replace

from peer.identity import Signed
from swarm.protocol.agreement import actions
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.output import encode
from swarm.protocol.agreement.records import BALLOT_KEY, BallotRecord, LinkRecord
from swarm.protocol.agreement.rules.acceptor import Ballot
from swarm.protocol.agreement.rules.evidence import START
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Ledger
from tests.simulation.electorate import position
from tests.simulation.machine import Machine
from tests.simulation.setups import COORDINATOR, Setup
from tests.simulation.tensors import GENESIS, SCHEDULE, State
from tests.simulation.world import World

SAMPLES: Final = 8  # of each round
ROSTER: Final = Signed(b"", "", b"")  # nobody opens it: what it leads to is written by hand
WITNESS: Final = Member(COORDINATOR, "1")


def member(peer: str) -> Member:
    return Member(peer, "1")


class StandIn:
    """In a node's place: it stands where it is put, does nothing, and notes what happens to it."""

    def __init__(self, peer: str, head: Head) -> None:
        self.me, self.head = member(peer), head
        self.events: list[object] = []
        self.links: dict[bytes, msg.ChainLink] = {}
        self._chain = SimpleNamespace(link=self.links.get, ancestors=lambda: [self.head])

    def step(self, now: float, event: object) -> list[actions.Action]:
        self.events.append(event)
        return []


class Stage:
    """The judge of one setup, and hands to make a history with."""

    def __init__(self, members: int = 3, **setup: Any) -> None:
        self.world = World(Setup("", members, **setup), 0, without=range(1000))
        self.world._queue.clear()
        self.judge = self.world.invariants

    def machine(self, peer: str) -> Machine:
        return self.world.machines[peer]

    def sign(self, peer: str, kind: str, body: Any) -> Signed:
        return self.world.signatures.of(peer).sign(kind, body)

    # -- heads ---------------------------------------------------------------------------------------------------------

    def after(self, before: Head, mark: str = "", samples: int = SAMPLES, **changes: Any) -> Head:
        """Return a head that may follow that one, with another state for another `mark`."""
        ledger = Ledger(before.ledger.cursor + samples)
        state = blake3(before.hash + mark.encode()).digest()
        self.world.tensors.states[state] = State(((0, ledger.cursor),))
        values = {"round": before.round + 1, "previous": before.hash, "state_hash": state, "ledger": ledger}
        values |= {"tokens": before.tokens + samples * SCHEDULE.seq_len, "attempt": 0, "learners": (), "absent": ()}
        return replace(before, **values | changes)

    def certified(self, head: Head, voters: str = "AB", /, **changes: Any) -> msg.ChainLink:
        """Return that head with the votes of these peers (W: the witness)."""
        bodies = [
            msg.VoteBody(
                head.previous, max(head.attempt, 0), head.hash, WITNESS if voter == COORDINATOR else member(voter)
            )
            for voter in voters
        ]
        votes = tuple(self.sign(one.voter.peer, "agreement.vote", replace(one, **changes)) for one in bodies)
        return msg.ChainLink(head, votes=votes)

    def start(self, base: Head, members: str = "ABC", undoes: tuple[Head, ...] = (), **changes: Any) -> msg.ChainLink:
        """Return the start of the next term from that head, signed by the coordinator."""
        values: dict[str, Any] = {"term": base.term + 1, "boot": base.term + 1, "previous": base.hash, "attempt": -1}
        values |= {"members": tuple(member(peer) for peer in members), "witness": WITNESS, "learners": (), "absent": ()}
        head = replace(base, **values | changes)
        body = msg.StartBody(head, tuple(one.hash for one in undoes))
        return msg.ChainLink(head, start=self.sign(COORDINATOR, START, body))

    def begun(self, peers: str = "WABC", **changes: Any) -> Head:
        """Return the start of the first term, at which these peers stand."""
        members = "".join(peer for peer in peers if peer != COORDINATOR)
        return self.commit(peers, self.start(GENESIS, members, **changes))

    # -- what peers do -------------------------------------------------------------------------------------------------

    def commit(self, peers: str, link: msg.ChainLink, on_disk: bool = True, held: bool = True, **changes: Any) -> Head:
        """Let each of these peers commit a head; `changes`: of what its certificate is said to be of."""
        head = replace(link.head, **changes)
        for peer in peers:
            machine = self.machine(peer)
            if on_disk:
                machine.disk.synced.link = encode(LinkRecord(0, link, True))
            if held:
                machine.candidate = head.state_hash
            self.judge.committed(machine, actions.CommitHead(head, link, b""))
            machine.committed = head.state_hash
        return head

    def round(self, before: Head, peers: str = "A", mark: str = "", voters: str = "AB", **changes: Any) -> Head:
        """Let these peers commit the round after a head."""
        return self.commit(peers, self.certified(self.after(before, mark, **changes), voters))

    def write(self, peer: str, head: Head, value: Head | None, voted: int = 0, promised: int = -1) -> None:
        """Put a ballot on a peer's disk, with the state that it has voted for."""
        disk = self.machine(peer).disk.synced
        accepted = msg.AcceptedValue(voted, value, ROSTER) if value is not None else None
        ballot = Ballot(max(promised, voted if value else -1), voted if value else -1, value.hash if value else b"")
        disk.records[BALLOT_KEY] = encode(BallotRecord(head.hash, ballot, accepted, None))
        disk.voted = value.state_hash if value is not None else b""

    def say_vote(self, peer: str, head: Head, value: Head, attempt: int = 0) -> None:
        body = msg.VoteBody(head.hash, attempt, value.hash, WITNESS if peer == COORDINATOR else member(peer))
        self.judge.sent(self.machine(peer), "B", msg.VoteMessage(self.sign(peer, "agreement.vote", body)))

    def vote(self, peer: str, head: Head, value: Head, attempt: int = 0) -> None:
        """Let a peer write a vote, and send it."""
        self.write(peer, head, value, attempt)
        self.say_vote(peer, head, value, attempt)

    def say_promise(self, peer: str, head: Head, attempt: int, accepted: tuple[int, Head] | None = None) -> None:
        value = msg.AcceptedValue(*accepted, ROSTER) if accepted is not None else None
        body = msg.PromiseBody(head.hash, attempt, WITNESS if peer == COORDINATOR else member(peer), value)
        self.judge.sent(self.machine(peer), "B", msg.PromiseMessage(self.sign(peer, "agreement.promise", body)))

    def promise(self, peer: str, head: Head, attempt: int, accepted: tuple[int, Head] | None = None) -> None:
        """Let a peer write a promise, and send it."""
        voted, value = accepted if accepted is not None else (0, None)
        self.write(peer, head, value, voted, promised=attempt)
        self.say_promise(peer, head, attempt, accepted)

    def propose(self, peer: str, value: Head) -> None:
        """Let a leader send a proposal."""
        self.judge.sent(
            self.machine(peer), "B", msg.ProposalMessage(ROSTER, value, (), msg.Support(ROSTER, ROSTER, ()))
        )

    def report(self, nonce: str, peer: str, head: Head, accepted: Head | None = None) -> None:
        """Let a peer tell the coordinator where it stands."""
        value = msg.AcceptedValue(0, accepted, ROSTER) if accepted is not None else None
        message = msg.ReportMessage(nonce, member(peer), position(head), head.hash, (), value)
        self.judge.coordinator_received(peer, message)

    def show(self, link: msg.ChainLink, peer: str = COORDINATOR) -> Head:
        """Let a peer send a link to others."""
        self.judge.sent(self.machine(peer), "A", msg.ChainMessage((link,)))
        return link.head

    def stand(self, peers: str, head: Head) -> None:
        """Put a stand-in for each peer's node at that head."""
        for peer in peers:
            self.machine(peer).up = True
            self.machine(peer).node = StandIn(peer, head)  # type: ignore[assignment]
