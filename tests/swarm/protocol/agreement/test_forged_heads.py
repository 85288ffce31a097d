"""One guest's keys make up a higher head: no member, newcomer or coordinator goes there, signs over it or believes it.

All heads here have a state that every peer holds, so a head that a node believes is one where it stands at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import msgspec
import pytest

from peer.identity import Signed
from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.config import Mode
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.head import Head, Member
from tests.swarm.protocol.agreement.group import COORDINATOR, GENESIS, GroupOfNodes
from tests.swarm.protocol.agreement.test_proof import is_proved

replace = msgspec.structs.replace
MEMBER, NEWCOMER, LIAR = "A", "n", "g00"


class Scene:
    """A run with one real member, the coordinator, and made-up histories. `guests`: the keys of one guest."""

    def __init__(self, mode: Mode, guests: int, honest: int, founders: int | None = None) -> None:
        """`founders`: how many honest peers are in the first head; else all."""
        self.group = GroupOfNodes(MEMBER, min_peers=1000, mode=mode)
        self.mode: Mode = mode
        self.guests = tuple(Member(f"g{number:02}", "s") for number in range(guests))
        others = [Member(f"h{number:02}", "s") for number in range(honest - 1)]
        self.honest = (self.group.member(MEMBER), *others)
        self.witness = self.group.member(COORDINATOR)
        first = self.honest if founders is None else self.honest[:founders]
        self.links = [self.start_of(self.honest_head(GENESIS, first), COORDINATOR)]
        for _ in range(3):
            before = self.last
            self.links.append(
                self.voted(before, self.honest_head(before, self.honest), (*before.members, self.witness))
            )
        self.show(MEMBER, COORDINATOR, self.links)
        self.show(COORDINATOR, MEMBER, self.links)
        self.group.run(0.1)
        assert self.group.head(MEMBER) == self.group.head(COORDINATOR) == self.last

    @property
    def last(self) -> Head:
        return self.links[-1].head

    def begin_term(self) -> None:
        """Begin another term of the same members at the last head."""
        head = replace(self.after(self.last, self.last.members), term=2, round=self.last.round, attempt=-1)
        self.links.append(self.start_of(head, COORDINATOR))
        self.show(COORDINATOR, MEMBER, self.links[-1:])
        self.show(MEMBER, COORDINATOR, self.links[-1:])

    # -- heads ---------------------------------------------------------------------------------------------------------

    def honest_head(self, before: Head, honest: Sequence[Member]) -> Head:
        return self.after(before, (*self.guests, *honest))

    def after(self, before: Head, members: Sequence[Member]) -> Head:
        first = not before.members
        return replace(
            before,
            term=before.term + first,
            round=before.round + (not first),
            previous=before.hash,
            members=tuple(sorted(members)),
            witness=self.witness,
            attempt=-1 if first else 0,
        )

    def voted(self, before: Head, head: Head, voters: Sequence[Member]) -> msg.ChainLink:
        def vote(voter: Member) -> Signed:
            body = msg.VoteBody(before.hash, 0, head.hash, voter)
            return self.group.sign(voter.peer, evidence.VOTE, body)

        return msg.ChainLink(head, votes=tuple(map(vote, voters)))

    def start_of(self, head: Head, signer: str) -> msg.ChainLink:
        return msg.ChainLink(head, start=self.group.sign(signer, evidence.START, msg.StartBody(head)))

    def forged_from(self, link: msg.ChainLink, rounds: int) -> list[msg.ChainLink]:
        """Return rounds after that head that the guest's keys alone have voted for."""
        links = [link]
        for _ in range(rounds):
            links.append(self.voted(links[-1].head, self.after(links[-1].head, self.guests), self.guests))
        return links[1:]

    # -- what is done with them ----------------------------------------------------------------------------------------

    def show(self, target: str, source: str, links: Sequence[msg.ChainLink]) -> None:
        for first in range(0, len(links), msg.LINKS_MAX):
            page = tuple(links[first : first + msg.LINKS_MAX])
            self.group.event(target, events.Received(source, msg.ChainMessage(page)))

    def claim(self, links: Sequence[msg.ChainLink]) -> None:
        """Say to all that this is where the guest stands, and show it, again and again."""
        head = links[-1].head
        for target in (MEMBER, COORDINATOR, NEWCOMER):
            if target in self.group.machines:
                status = msg.StatusMessage(position_of(head), head.hash, self.guests[0], False, 0)
                self.group.event(target, events.Received(LIAR, status))
                self.show(target, LIAR, links)

    def ask_person(self, links: Sequence[msg.ChainLink], undo: bool = True) -> None:
        """The operator asks for a new term, and the guest answers that it stands there and holds its state."""
        self.group.event(COORDINATOR, events.RegroupRequested(undo=undo))
        self.group.run(0.1)
        asks = [message for _, _, message in self.group.sent if isinstance(message, msg.AskMessage)]
        head = links[-1].head
        self.show(COORDINATOR, LIAR, links)
        told = msg.ReportMessage(
            nonce=asks[-1].nonce,
            voter=self.guests[0],
            position=position_of(head),
            head=head.hash,
            holds=(head.state_hash,),
            accepted=None,
            support=None,
            links=tuple(links[-msg.LINKS_MAX :]),
        )
        self.group.event(COORDINATOR, events.Received(LIAR, told))
        self.group.run(10.0)

    def check(self, forged: Sequence[msg.ChainLink], regrouped: bool = False) -> None:
        """Nobody stands at one of these heads, and the coordinator has signed for none."""
        names = {link.head.hash for link in forged}
        for machine in self.group.machines.values():
            assert not names & {head.hash for head in machine.committed}, machine.peer
            assert machine.node.head.hash not in names, machine.peer
        if not regrouped:
            assert self.group.head(MEMBER) == self.group.head(NEWCOMER) == self.last
        for signer, kind, body in self.group.table.signed:
            if signer == COORDINATOR and kind == evidence.ENDORSEMENT:
                assert msgspec.msgpack.decode(body, type=msg.EndorsementBody).head not in names
            if signer == COORDINATOR and kind == evidence.START:
                start = msgspec.msgpack.decode(body, type=msg.StartBody)
                assert start.head.previous not in names and start.head.hash not in names
                assert start.head.round <= self.last.round


Forgery = Callable[[Scene], list[msg.ChainLink]]


def own_votes(scene: Scene) -> list[msg.ChainLink]:
    return scene.forged_from(scene.links[-1], 3)


def higher_term(scene: Scene) -> list[msg.ChainLink]:
    head = replace(scene.after(scene.last, scene.guests), term=9, round=1000)
    return [scene.voted(scene.last, head, scene.guests)]


def own_start(scene: Scene) -> list[msg.ChainLink]:
    head = replace(scene.after(scene.last, scene.guests), term=9, boot=7, attempt=-1)
    return [scene.start_of(head, LIAR), *scene.forged_from(scene.start_of(head, LIAR), 2)]


def anothers_start(scene: Scene) -> list[msg.ChainLink]:
    """The coordinator's start of the first head, at a head that it is not for."""
    head = replace(scene.after(scene.last, scene.guests), term=9, attempt=-1)
    return [replace(scene.start_of(head, LIAR), start=scene.links[0].start)]


def own_endorsement(scene: Scene) -> list[msg.ChainLink]:
    head = scene.after(scene.last, scene.guests)
    signed = scene.group.sign(LIAR, evidence.ENDORSEMENT, msg.EndorsementBody(head.hash))
    return [replace(scene.voted(scene.last, head, scene.guests), endorsement=signed)]


def votes_of_others(scene: Scene) -> list[msg.ChainLink]:
    """Votes in the names of honest members and the coordinator, signed with the guest's key."""
    head = scene.after(scene.last, scene.guests)
    link = scene.voted(scene.last, head, scene.guests)
    false = [
        scene.group.sign(LIAR, evidence.VOTE, msg.VoteBody(scene.last.hash, 0, head.hash, voter))
        for voter in (*scene.honest, scene.witness)
    ]
    relabelled = [Signed(signed.body, voter.peer, b"") for signed, voter in zip(false, scene.honest, strict=False)]
    return [replace(link, votes=(*link.votes, *relabelled))]


FORGERIES: list[Forgery] = [own_votes, higher_term, own_start, anothers_start, own_endorsement, votes_of_others]


@pytest.mark.parametrize("forgery", FORGERIES)
@pytest.mark.parametrize("guests", [1, 6, 40])
@pytest.mark.parametrize("mode", ["witness", "required"])
def test_a_minority_of_the_last_head_makes_up_nothing(mode: Mode, guests: int, forgery: Forgery) -> None:
    scene = Scene(mode, guests, guests + 1)
    forged = forgery(scene)
    scene.group.start(NEWCOMER)
    for _ in range(3):
        scene.claim(forged)
        scene.group.run(5.0)
    scene.check(forged)
    assert is_proved(scene.group, scene.last, scene.links, mode=mode), "the control"
    for number in range(len(forged)):
        shown = forged[: number + 1]
        assert not is_proved(scene.group, shown[-1].head, (*scene.links, *shown), mode=mode)
        assert not is_proved(scene.group, shown[-1].head, shown, mode=mode)
    scene.ask_person(forged)
    scene.check(forged, regrouped=True)


@pytest.mark.parametrize("guests", [3, 40])
@pytest.mark.parametrize("forgery", FORGERIES)
def test_where_the_coordinator_is_required_a_majority_makes_up_nothing_either(forgery: Forgery, guests: int) -> None:
    scene = Scene("required", guests, 1)
    forged = forgery(scene)
    scene.group.start(NEWCOMER)
    for _ in range(3):
        scene.claim(forged)
        scene.group.run(5.0)
    scene.check(forged)
    assert not is_proved(scene.group, forged[-1].head, (*scene.links, *forged), mode="required")
    scene.ask_person(forged)
    scene.check(forged, regrouped=True)


def test_a_majority_of_the_last_head_is_the_run() -> None:
    """The control, and what `witness` does not stop: docs/run/security.md says so."""
    scene = Scene("witness", 3, 2)
    forged = scene.forged_from(scene.links[-1], 1)
    scene.claim(forged)
    scene.group.run(1.0)
    assert scene.group.head(MEMBER) == scene.group.head(COORDINATOR) == forged[-1].head
    assert is_proved(scene.group, forged[-1].head, (*scene.links, *forged))


@pytest.mark.parametrize("guests", [1, 6, 40])
def test_who_was_a_majority_once_makes_up_no_second_history(guests: int) -> None:
    """The keys of one guest began the run alone. Later, as a minority, they signed other rounds after its first head:
    a newcomer went there."""
    scene = Scene("witness", guests, guests + 1, founders=0 if guests == 1 else 1)
    forged = scene.forged_from(scene.links[0], 150)
    assert position_of(forged[-1].head) > position_of(scene.last)
    scene.group.start(NEWCOMER)
    scene.claim([scene.links[0], *forged])
    for _ in range(3):
        scene.group.run(5.0)
        scene.claim(forged)
    scene.check(forged)


@pytest.mark.parametrize("guests", [1, 6, 40])
def test_no_regroup_goes_to_a_history_of_who_was_a_majority_once(guests: int) -> None:
    """The same after a new term, at the coordinator: a start begins at the furthest branch of any term, so one that
    they had made took the run there once the operator agreed to lose the other."""
    scene = Scene("witness", guests, guests + 1, founders=0 if guests == 1 else 1)
    scene.begin_term()
    forged = scene.forged_from(scene.links[0], 150)
    for _ in range(3):
        scene.ask_person([scene.links[0], *forged])
    scene.check(forged, regrouped=True)
    told = [scene.group.told(COORDINATOR, name) for name in ("regrouped", "regroup_withdrawn")]
    assert any(told), "the control"


def answer(group: GroupOfNodes, links: Sequence[msg.ChainLink], voters: str) -> None:
    """These peers, which have no process, answer the coordinator's last question: they stand at the end of `links`."""
    head = links[-1].head
    nonce = next(message.nonce for _, _, message in reversed(group.sent) if isinstance(message, msg.AskMessage))
    for peer in voters:
        group.event(COORDINATOR, events.Received(peer, msg.ChainMessage(tuple(links))))
        told = msg.ReportMessage(nonce, group.member(peer), position_of(head), head.hash, holds=(head.state_hash,))
        group.event(COORDINATOR, events.Received(peer, told))


def left_long_ago() -> tuple[GroupOfNodes, list[msg.ChainLink]]:
    """B and C were lost at round 3, and A and d are at round 12 of the next term when forty rounds come that the keys
    of B and C have signed since."""
    group = GroupOfNodes("ABC")
    group.run_to(3)
    group.crash("B")
    group.crash("C")
    group.run(40.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(3.0)
    start = group.head("A")
    base = next(head for head in group.machines["A"].committed if head.hash == start.previous)
    group.start("d")
    group.run_to(12, "Ad")
    group.lost = lambda source, target, message: isinstance(message, msg.ProposalMessage)
    group.run(3.0)
    assert start.term == 2 and group.head(COORDINATOR).has(group.member("d"))
    links, head = list[msg.ChainLink](), base
    for _ in range(40):
        before, head = head, replace(head, round=head.round + 1, previous=head.hash, attempt=0)
        links.append(msg.ChainLink(head, votes=tuple(group.vote(peer, before, 0, head) for peer in "BC")))
    return group, links


@pytest.mark.parametrize("undo", [False, True])
def test_a_branch_of_peers_that_have_left_is_no_base_beside_the_living(undo: bool) -> None:
    """They answered the operator, who was told to undo the rounds after 43 where the run was at 12."""
    group, forged = left_long_ago()
    stood = group.head("A")
    group.run(60.0)
    for _ in range(3):
        group.event(COORDINATOR, events.RegroupRequested(undo=undo))
        group.run(0.1)
        answer(group, forged, "BC")
        group.run(5.0)
    assert not group.told(COORDINATOR, "regroup_undoes")
    last = group.head(COORDINATOR)
    coordinator = group.machines[COORDINATOR].node._coordinator
    assert coordinator is not None and stood in list(coordinator._branches.way_to(last))
    assert last.term >= 3 and group.head("A") == last
    assert group.told(COORDINATOR, "regrouped")[-1]["undone"] == 0


def test_where_only_peers_that_have_left_answer_the_operator_sees_both_branches() -> None:
    group, forged = left_long_ago()
    reached = group.round(COORDINATOR)
    group.crash("A")
    group.crash("d")
    group.run(60.0)
    group.event(COORDINATOR, events.RegroupRequested())
    group.run(0.1)
    answer(group, forged, "BC")
    group.run(5.0)
    (told,) = group.told(COORDINATOR, "regroup_undoes")
    assert (told["goes_on_at"], told["undone"]) == (43, reached - 3) and group.head(COORDINATOR).term == 2
    assert told["branches"] == (
        f"round 43 of term 1 with B, C: undoes {reached - 3}",
        f"round 3 of term 2 with no peer: undoes {reached + 37}",
    )


def test_a_newcomer_begins_without_the_coordinator_where_that_says_nothing() -> None:
    group = GroupOfNodes("ABC")
    group.run_to(2)
    group.crash(COORDINATOR)
    group.start("d")
    group.event("d", events.PeerUp("A"))
    group.run_to(12)
    assert group.head("A").has(group.member("d"))
