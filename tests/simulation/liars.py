"""Peers that lie: each runs a node of the real core and bends what it says, with its own key only.

The strategies are those of the audit (S1 to S8, R1 to R13 are its reproductions) and of the model."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING, Final

from msgspec.structs import replace

from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range
from swarm.protocol.plan import Contribution
from tests.simulation.mutator import Mutator
from tests.simulation.setups import COORDINATOR
from tests.simulation.tensors import MICRO_BATCH

if TYPE_CHECKING:
    from tests.simulation.machine import Machine
    from tests.simulation.world import World


class Liar:
    """A peer that says what its node says; the strategies change one thing each."""

    def __init__(self, world: World, machine: Machine, random: Random) -> None:
        self.world, self.machine, self.random = world, machine, random
        self.peer, self.sign = machine.peer, machine.signer.sign

    def send(self, target: str, message: msg.Message) -> None:
        """Send what the node wants to send, or something else."""
        self.world.transmit(self.peer, target, message)

    def hears(self, source: str, message: msg.Message) -> bool:
        """Look at what comes in; return whether the node may see it."""
        return True

    def contribution(self, body: Contribution) -> Contribution:
        return body

    def claims(self, counted: tuple[Range, ...], batch: Range) -> tuple[Range, ...]:
        """Return what the peer says it has counted of a synchronous pipeline's batch."""
        return counted

    def result(self, honest: bytes) -> bytes:
        return honest

    # -- helpers -------------------------------------------------------------------------------------------------------

    @property
    def others(self) -> list[str]:
        return [peer for peer in self.world.machines if peer != self.peer]

    @property
    def head(self) -> Head:
        assert self.machine.node is not None
        return self.machine.node.head

    @property
    def me(self) -> Member:
        assert self.machine.node is not None
        return self.machine.node.me

    def all_get(self, message: msg.Message) -> None:
        for peer in self.others:
            self.world.transmit(self.peer, peer, message)

    def made_up_head(self, ahead: int = 1) -> Head:
        """Return a head that would give this peer everything."""
        head = self.head
        return replace(
            head, round=head.round + ahead, previous=head.hash, state_hash=b"\xee" * 32, members=(self.me,), attempt=0
        )

    def forge(self, seed: bytes) -> bytes:
        """Return the name of a made-up result, whose bytes this peer serves."""
        name = (b"\xff" + self.peer.encode() + seed + bytes(32))[:32]
        self.world.tensors.forged.add(name)
        self.machine.slices.add(name)
        return name

    def vote_for(self, head_hash: bytes, attempt: int, value: bytes) -> None:
        """Vote, whatever was voted before."""
        vote = msg.VoteBody(head_hash, attempt, value, self.me)
        self.all_get(msg.VoteMessage(self.sign(evidence.VOTE, vote)))


class TwoFacedOwner(Liar):
    """Signs another result than it sends, or both (R13)."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.ResultsMessage) and message.results.signer == self.peer:
            body = self.world.signatures.open(message.results, evidence.RESULTS, msg.ResultsBody)
            if self.random.random() < 0.5:
                forged = tuple(self.forge(target.encode() + bytes([i]) + name) for i, name in enumerate(body.hashes))
                if self.random.random() < 0.5:
                    super().send(target, message)
                message = replace(message, results=self.sign(evidence.RESULTS, replace(body, hashes=forged)))
        super().send(target, message)


class FalseOwner(Liar):
    """Merges another result than the honest one, the same for all."""

    def result(self, honest: bytes) -> bytes:
        return self.forge(honest) if self.random.random() < 0.5 else honest


class TwoFacedLeader(Liar):
    """Proposes two values in one attempt, each to a half, and votes for both (F2, S3)."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.ProposalMessage) and message.proposal.signer == self.peer:
            other = self._other(message)
            if other is not None:
                body = self.world.signatures.open(other.proposal, evidence.PROPOSAL, msg.ProposalBody)
                self.vote_for(body.head, body.attempt, message.value.hash)
                self.vote_for(body.head, body.attempt, other.value.hash)
                if sorted(self.others).index(target) % 2:
                    message = other
        super().send(target, message)

    def _other(self, message: msg.ProposalMessage) -> msg.ProposalMessage | None:
        build = self.machine.last_build
        mine = [i for i, signed in enumerate(message.support.results) if signed.signer == self.peer]
        if build is None or build.roster.signed != message.support.roster or not mine:
            return None
        names = {i: self.forge(bytes([i]) + build.roster.key) for i in build.roster.parts.get(self.me, ())}
        results = tuple(names.get(i, name) for i, name in enumerate(build.results))
        state = self.world.tensors.build(build.base, build.roster, results)
        self.machine.extra_states.add(state)
        body = self.world.signatures.open(message.support.results[mine[0]], evidence.RESULTS, msg.ResultsBody)
        all_results = list(message.support.results)
        all_results[mine[0]] = self.sign(evidence.RESULTS, replace(body, hashes=tuple(names.values())))
        value = replace(message.value, state_hash=state)
        proposal = self.world.signatures.open(message.proposal, evidence.PROPOSAL, msg.ProposalBody)
        return replace(
            message,
            proposal=self.sign(evidence.PROPOSAL, replace(proposal, value=value.hash)),
            value=value,
            support=replace(message.support, results=tuple(all_results)),
        )


class TwoRosters(Liar):
    """Gives each half another roster in one attempt."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.RosterMessage) and sorted(self.others).index(target) % 2:
            body = self.world.signatures.open(message.roster, evidence.ROSTER, msg.RosterBody)
            if len(body.contributions) > 1:
                other = replace(body, contributions=body.contributions[:-1])
                message = replace(message, roster=self.sign(evidence.ROSTER, other))
        super().send(target, message)


class Forgetful(Liar):
    """Hides what it has accepted from later leaders."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.PromiseMessage):
            body = self.world.signatures.open(message.promise, evidence.PROMISE, msg.PromiseBody)
            message = replace(message, promise=self.sign(evidence.PROMISE, replace(body, accepted=None)), support=None)
        elif isinstance(message, msg.ReportMessage):
            message = replace(message, accepted=None, support=None)
        super().send(target, message)


class VotesForAll(Forgetful):
    """Votes for every value of every attempt at once, without building it, and hides it later."""

    def hears(self, source: str, message: msg.Message) -> bool:
        if isinstance(message, msg.ProposalMessage) and self.machine.node is not None:
            body = self.world.signatures.opened.get((source, evidence.PROPOSAL, message.proposal.body))
            if isinstance(body, msg.ProposalBody):
                self.vote_for(body.head, body.attempt, message.value.hash)
        return True


class MadeUpAccepted(Liar):
    """Says in its promises that it has accepted what never was proposed (F10)."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.PromiseMessage):
            body = self.world.signatures.open(message.promise, evidence.PROMISE, msg.PromiseBody)
            if body.attempt > 0:
                value = self.made_up_head()
                claim = msg.ProposalBody(body.head, body.attempt - 1, value.hash)
                accepted = msg.AcceptedValue(body.attempt - 1, value, self.sign(evidence.PROPOSAL, claim))
                message = replace(message, promise=self.sign(evidence.PROMISE, replace(body, accepted=accepted)))
        super().send(target, message)


class MadeUpHeads(Liar):
    """Shows heads that nobody but itself has voted for, and says that it stands far ahead (R1, S8; F1, F6)."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.StatusMessage) and self.random.random() < 0.5:
            value = self.made_up_head(self.random.choice((1, 50)))
            vote = self.sign(evidence.VOTE, msg.VoteBody(value.previous, 0, value.hash, self.me))
            super().send(target, msg.ChainMessage((msg.ChainLink(value, votes=(vote,)),)))
            message = replace(message, position=(value.term, value.boot, value.round), head=value.hash)
        elif isinstance(message, msg.ReportMessage):
            value = self.made_up_head(50)
            message = replace(message, position=(value.term, value.boot, value.round), head=value.hash)
        super().send(target, message)


class PackedElectorate(Liar):
    """Leads once, and fills the next electorate with itself (S1; F7)."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.ProposalMessage) and message.proposal.signer == self.peer:
            packed = tuple(sorted({self.me, *(Member(f"{self.peer}{i}", "x") for i in range(6))}))
            value = replace(message.value, members=packed)
            body = self.world.signatures.open(message.proposal, evidence.PROPOSAL, msg.ProposalBody)
            signed = self.sign(evidence.PROPOSAL, replace(body, value=value.hash))
            message = replace(message, value=value, proposal=signed)
        super().send(target, message)


class Silent(Liar):
    """Answers polls and little else."""

    def hears(self, source: str, message: msg.Message) -> bool:
        return isinstance(message, msg.StatusMessage | msg.AskMessage) or self.random.random() < 0.3


class NoShow(Liar):
    """Is planned for and submits nothing (R10)."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.PromiseMessage):
            message = replace(message, contribution=None)
        if not isinstance(message, msg.SubmitMessage):
            super().send(target, message)


class Replayer(Liar):
    """Sends again what others once sent."""

    def __init__(self, world: World, machine: Machine, random: Random) -> None:
        super().__init__(world, machine, random)
        self._kept: list[msg.Message] = []

    def hears(self, source: str, message: msg.Message) -> bool:
        if len(self._kept) < 100 and not isinstance(message, msg.StatusMessage | msg.ReportMessage):
            self._kept.append(message)
        if self._kept and self.random.random() < 0.3:
            self.world.transmit(self.peer, self.random.choice(self.others), self.random.choice(self._kept))
        return True


class JoinFlood(Liar):
    """Asks to join under many sessions (R7; F8)."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.StatusMessage):
            for index in range(4):
                body = msg.JoinBody(self.head.hash, Member(self.peer, f"flood {index}"), self.machine.config.credential)
                super().send(target, msg.JoinMessage(self.sign(evidence.JOIN, body)))
        super().send(target, message)


class FalseCoordinator(Liar):
    """Starts terms, endorses heads, names witnesses and asks, as if it were the coordinator."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.StatusMessage):
            head = replace(self.made_up_head(0), term=self.head.term + 1, attempt=-1)
            start = self.sign(evidence.START, msg.StartBody(head))
            false = (
                msg.ChainMessage((msg.ChainLink(head, start=start),)),
                msg.EndorsementMessage(self.sign(evidence.ENDORSEMENT, msg.EndorsementBody(head.hash))),
                msg.WitnessMessage(self.sign(evidence.WITNESS, msg.WitnessBody(head.run_id, Member(COORDINATOR, "x")))),
                msg.AskMessage("x", head.hash),
            )
            super().send(target, self.random.choice(false))
        super().send(target, message)


class FalseAccuser(Liar):
    """Shows pairs of an honest peer's bodies that contradict nothing, and says that it lacks everybody's slices."""

    def __init__(self, world: World, machine: Machine, random: Random) -> None:
        super().__init__(world, machine, random)
        self._seen: dict[tuple[str, str], Signed] = {}

    def hears(self, source: str, message: msg.Message) -> bool:
        found = {
            msg.VoteMessage: (evidence.VOTE, "vote"),
            msg.ResultsMessage: (evidence.RESULTS, "results"),
            msg.ProposalMessage: (evidence.PROPOSAL, "proposal"),
            msg.PlanMessage: ("plan", "plan"),
            msg.RosterMessage: (evidence.ROSTER, "roster"),
        }.get(type(message))
        if found is not None:
            signed: Signed = getattr(message, found[1])
            other = self._seen.setdefault((signed.signer, found[0]), signed)
            if other != signed:
                self.all_get(msg.ProofMessage(msg.Contradiction(found[0], other, signed)))
        return True

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.PromiseMessage):
            message = replace(message, missing=(tuple(self.others), tuple(self.others)))
        super().send(target, message)


class Greedy(Liar):
    """Claims more work than it was assigned (S2, R5; F12, F13)."""

    def contribution(self, body: Contribution) -> Contribution:
        factor = self.random.choice((0, 2, 1000))
        return replace(body, steps=body.steps * factor, samples=body.samples * factor, sqnorms=(1e12,) * 4)


class FalseClaims(Liar):
    """Says that it has counted more than it has, and submits nothing, what it has, what all have, or what none has."""

    def claims(self, counted: tuple[Range, ...], batch: Range) -> tuple[Range, ...]:
        return (batch,) if self.random.random() < 0.5 else counted

    def contribution(self, body: Contribution) -> Contribution:
        (first, last), draw_ = self.machine.batch.batch, self.random.random()
        if draw_ < 0.3:
            return replace(body, steps=0, samples=0, counted=(), hashes=(), sqnorms=())
        if draw_ > 0.6 or not body.steps:
            return body
        size, ahead = last - first, (last - first) * (draw_ < 0.4)  # samples of this round's batch, or of the next one
        return replace(body, steps=size // MICRO_BATCH, samples=size, counted=((first + ahead, last + ahead),))


class Hasty(Liar):
    """Prepares attempts far ahead, and those of others."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.PrepareMessage | msg.StatusMessage):
            head = self.head
            attempt = self.random.choice((1, 7, 1000, 1 << 30))
            super().send(target, msg.PrepareMessage(head.hash, attempt, (head.term, head.boot, head.round)))
        super().send(target, message)


class Mutating(Liar):
    """Changes any field of any message."""

    def __init__(self, world: World, machine: Machine, random: Random) -> None:
        super().__init__(world, machine, random)
        self._mutator = Mutator(random, machine.signer)

    def hears(self, source: str, message: msg.Message) -> bool:
        self._mutator.see(message)
        return True

    def send(self, target: str, message: msg.Message) -> None:
        self._mutator.see(message)
        if self.random.random() < 0.35:
            message = self._mutator.mutate(message)
        super().send(target, message)


class TwoVotes(Liar):
    """Votes for a second value in each attempt that it votes in."""

    def send(self, target: str, message: msg.Message) -> None:
        if isinstance(message, msg.VoteMessage):
            body = self.world.signatures.open(message.vote, evidence.VOTE, msg.VoteBody)
            if self.random.random() < 0.5:
                self.vote_for(body.head, body.attempt, self.made_up_head().hash)
        super().send(target, message)


LIES: Final[dict[str, type[Liar]]] = {
    kind.__name__: kind
    for kind in (
        TwoFacedOwner, TwoFacedLeader, TwoRosters, TwoVotes, Forgetful, VotesForAll, MadeUpAccepted, MadeUpHeads,
        PackedElectorate, Silent, NoShow, Replayer, JoinFlood, FalseCoordinator, FalseAccuser, Greedy, Hasty, Mutating,
        FalseOwner, FalseClaims,
    )
}  # fmt: skip
NAMED_ONLY: Final = {"FalseOwner", "FalseClaims"}
"""Lies for setups that name them: others would draw other schedules than those that were kept."""
EQUIVOCATING: Final = {"TwoFacedLeader", "TwoVotes", "Forgetful", "VotesForAll", "Mutating"}
"""Lies that a group with `coordinator = "witness"` does not tolerate: a majority of it may make two histories."""


def draw(world: World, machine: Machine, random: Random) -> Liar:
    """Choose a peer's strategy."""
    setup = world.setup
    left_out = NAMED_ONLY | (EQUIVOCATING if setup.mode == "witness" else set())
    lies = setup.lies or tuple(lie for lie in LIES if lie not in left_out)
    name = random.choice(lies)
    world.covered[f"lie {name}"] += 1
    world.note(machine.peer, f"lies as {name}")
    return LIES[name](world, machine, random)
