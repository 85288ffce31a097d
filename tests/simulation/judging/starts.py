"""Histories of starts and of certificates, each with a neighbour that holds and differs in one thing."""

from __future__ import annotations

from msgspec.structs import replace

from swarm.protocol.agreement import messages as msg
from tests.simulation.invariants import ANSWERED_S
from tests.simulation.judging.stage import Stage, StandIn
from tests.simulation.judging.votes import broken
from tests.simulation.tensors import GENESIS

# -- lineage -----------------------------------------------------------------------------------------------------------


@broken("2 lineage: two starts of term 1")
def two_starts_of_one_term(breaks: bool) -> None:
    stage = Stage()
    stage.show(stage.start(GENESIS, "ABC"))
    stage.show(stage.start(GENESIS, "AB", boot=1 if breaks else 2))


@broken("2 lineage: two starts of term 1")
def another_start_beside_one_at_which_peers_stand(breaks: bool) -> None:
    stage = Stage()
    stage.begun()
    stage.show(stage.start(GENESIS, "AB" if breaks else "ABC"))


@broken("2 lineage: the start of term 2 changes the state")
def a_start_with_another_state(breaks: bool) -> None:
    stage = Stage()
    one = stage.round(stage.begun())
    stage.show(stage.start(one, state_hash=GENESIS.state_hash if breaks else one.state_hash))


@broken("2 lineage: the start of term 2 changes the state")
def a_start_with_another_ledger(breaks: bool) -> None:
    stage = Stage()
    one = stage.round(stage.begun())
    stage.show(stage.start(one, ledger=GENESIS.ledger if breaks else one.ledger))


@broken("2 lineage: the start of term 2 changes the state")
def a_start_of_another_round(breaks: bool) -> None:
    stage = Stage()
    one = stage.round(stage.begun())
    stage.show(stage.start(one, round=2 if breaks else 1))


@broken("2 lineage: .* follows a head that W cannot prove")
def a_start_after_a_head_of_nobody(breaks: bool) -> None:
    stage = Stage()
    one = stage.certified(stage.after(stage.begun()))
    node = StandIn("W", one.head)
    stage.machine("W").node = node  # type: ignore[assignment]
    if not breaks:
        node.links[one.head.hash] = one
    stage.show(stage.start(one.head))


@broken("2 lineage: .* follows a head that A cannot prove")
def a_round_after_a_head_of_nobody(breaks: bool) -> None:
    stage = Stage()
    one = stage.certified(stage.after(stage.begun()))
    node = StandIn("A", one.head)
    if not breaks:
        node.links[one.head.hash] = one
    stage.machine("A").node = node  # type: ignore[assignment]
    stage.round(one.head)


@broken("2 lineage: the coordinator has not signed")
def a_start_that_a_member_has_signed(breaks: bool) -> None:
    stage = Stage()
    link = stage.start(GENESIS)
    assert link.start is not None
    body = stage.world.signatures.open(link.start, "agreement.start", msg.StartBody)
    signed = stage.sign("B" if breaks else "W", "agreement.start", body)
    stage.commit("A", msg.ChainLink(link.head, start=signed))


@broken("2 lineage: the coordinator has not signed")
def a_start_of_another_head(breaks: bool) -> None:
    stage = Stage()
    link = stage.start(GENESIS)
    head = replace(link.head, inner_step=9) if breaks else link.head
    stage.commit("A", msg.ChainLink(head, start=link.start))


@broken("2 lineage: term 1 begins without the coordinator")
def a_term_by_votes(breaks: bool) -> None:
    stage = Stage()
    one = stage.after(stage.begun(), attempt=-1 if breaks else 0)
    stage.commit("A", stage.certified(one))


@broken("2 lineage: round 2 follows a head that no honest peer")
def a_term_by_votes_after_a_head_of_nobody(breaks: bool) -> None:
    stage = Stage()
    one = stage.certified(stage.after(stage.begun()))
    if not breaks:
        stage.commit("A", one)
    stage.commit("A", stage.certified(stage.after(one.head, attempt=-1 if breaks else 0)))


@broken("2 lineage: the start of term 2 follows no head")
def a_start_that_was_a_value_after_no_head(breaks: bool) -> None:
    """A liar reports the head of a start as a value that it has accepted."""
    stage = Stage()
    one = stage.certified(stage.after(stage.begun()))
    if not breaks:
        stage.commit("C", one)
    link = stage.start(one.head)
    stage.report("n", "C", GENESIS, link.head)
    stage.commit("A", link)


@broken("2 lineage: .* follows a head that W cannot prove")
def a_start_after_a_value_that_nobody_has_proposed(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    one = stage.after(start)
    if not breaks:
        stage.propose("A", one)
    stage.show(stage.start(one))


@broken("2 lineage: .* follows a head that W cannot prove")
def a_start_after_a_value_that_nobody_has_accepted(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    one = stage.after(start)
    if not breaks:
        stage.vote("A", start, one)
    stage.show(stage.start(one))


@broken("2 lineage: .* follows a head that W cannot prove")
def a_start_after_a_value_that_nobody_has_told_of(breaks: bool) -> None:
    stage = Stage(liars=1)
    start = stage.begun()
    one = stage.after(start)
    stage.report("n", "C", start, accepted=None if breaks else one)
    stage.show(stage.start(one))


@broken("2 lineage: the start of term 2 changes the state")
def a_start_that_is_judged_once_a_member_stands_at_it(breaks: bool) -> None:
    stage = Stage()
    one = stage.round(stage.begun())
    stage.commit("A", stage.start(one, round=2 if breaks else 1))


@broken("11 not by hearsay")
def a_head_that_was_passed_without_a_certificate(breaks: bool) -> None:
    stage = Stage()
    one = stage.certified(stage.after(stage.begun()), "A" if breaks else "AB")
    node = StandIn("A", one.head)
    node.links[one.head.hash] = one
    stage.machine("A").node = node  # type: ignore[assignment]
    stage.round(one.head)


# -- what starts undo --------------------------------------------------------------------------------------------------


@broken("3 one commit a round: the start of term 2 silently undoes round 1")
def a_start_that_undoes_what_a_member_has_told(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    one = stage.round(start)
    stage.report("n", "A", one)
    stage.show(stage.start(start, undoes=() if breaks else (one,)))


@broken("3 one commit a round: the start of term 2 silently undoes round 1")
def a_start_that_undoes_what_was_told_in_time(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    one = stage.round(start)
    if breaks:
        stage.report("n", "A", one)
    link = stage.start(start)
    stage.report("n", "A", one)
    stage.show(link)


@broken("3 one commit a round: the start of term 2 silently undoes round 1")
def a_start_that_undoes_what_its_signer_stood_at(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    stage.round(start, "AW" if breaks else "A")
    stage.show(stage.start(start))


@broken("3 one commit a round: the start of term 2 silently undoes round 1")
def a_start_that_undoes_a_value_which_was_committed(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    one = stage.round(start)
    stage.report("n", "B", start, accepted=one if breaks else None)
    stage.show(stage.start(start))


@broken("3 one commit a round: the start of term 2 silently undoes round 1")
def a_required_start_that_undoes_a_commit(breaks: bool) -> None:
    stage = Stage(mode="required")
    start = stage.begun()
    one = stage.round(start, voters="ABW")
    stage.show(stage.start(start if breaks else one))


@broken("3 one commit a round: the start of term 2 silently undoes round 1")
def a_required_round_that_a_start_has_undone(breaks: bool) -> None:
    stage = Stage(mode="required")
    start = stage.begun()
    one = stage.after(start)
    stage.show(stage.start(start, undoes=() if breaks else (one,)))
    stage.commit("A", stage.certified(one, "ABW"))


@broken("3 one commit a round: B leaves round 1")
def a_round_left_for_a_start_that_missed_it(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    one = stage.round(start, "B")
    stage.commit("B", stage.start(start if breaks else one))


@broken("3 one commit a round: B leaves round 2")
def a_round_left_for_a_start_of_the_same_round(breaks: bool) -> None:
    """The start is based on another branch, which B does not know. A start of a later round has gone further."""
    stage = Stage()
    begun = stage.begun()
    two = stage.round(stage.round(begun, "B"), "B")
    other = stage.round(stage.commit("CW", stage.start(begun, "C")), "C", "other", voters="C")
    other = stage.round(other, "C", voters="C")
    if not breaks:
        other = stage.round(other, "C", voters="C")
    assert two.round == 2
    stage.commit("B", stage.start(other, "BC"))


@broken("3 one commit a round: B leaves round 1")
def a_round_left_for_a_start_that_does_not_list_it(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    one = stage.round(start, "B")
    stage.commit("B", stage.start(start, undoes=() if breaks else (one,)))


@broken("3 one commit a round: B leaves round 1")
def a_round_left_for_a_start_before_that_has_ended_one(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    stage.round(start, "B")
    second = stage.start(start, "ABC")
    stage.commit("AC", second)
    if not breaks:
        stage.round(second.head, "A", "second", voters="AC")
    stage.commit("B", second)


@broken("3 one commit a round: B leaves round 1")
def a_round_left_behind_a_start_over_it(breaks: bool) -> None:
    """B stands at a start that keeps its round; the next start does not."""
    stage = Stage()
    start = stage.begun()
    one = stage.round(start, "B")
    second = stage.commit("B", stage.start(one))
    stage.commit("B", stage.start(start if breaks else second, term=3, boot=3))


@broken("3 one commit a round: B leaves round 1")
def a_round_left_by_a_machine_that_has_forgotten_nothing(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    stage.round(start, "B")
    stage.machine("B").restored = not breaks
    stage.commit("B", stage.start(start))


@broken("3 one commit a round: B leaves round 1")
def a_round_left_with_its_disk_intact(breaks: bool) -> None:
    stage = Stage()
    start = stage.begun()
    stage.round(start, "B")
    if not breaks:
        stage.judge.wiped("B")
    stage.commit("B", stage.start(start))


@broken("3 one commit a round: the start of term 2 silently undoes round 2")
def a_start_whose_list_has_room_for_more(breaks: bool) -> None:
    """A full list names the newest, and all above its base are undone."""
    stage = Stage()
    start = stage.begun()
    two = stage.round(stage.round(start))
    stage.report("n", "A", two)
    others = tuple(stage.after(start, str(number)) for number in range(msg.LINKS_MAX - breaks))
    stage.show(stage.start(start, undoes=others))


# -- with whom ---------------------------------------------------------------------------------------------------------


@broken("10 electorate: the start of term 1 has the members")
def a_start_with_a_peer_twice(breaks: bool) -> None:
    stage = Stage()
    stage.show(stage.start(GENESIS, "AAB" if breaks else "ABC"))


@broken("10 electorate: the start of term 1 has the members")
def a_start_with_the_coordinator_as_a_member(breaks: bool) -> None:
    stage = Stage()
    stage.show(stage.start(GENESIS, "ABW" if breaks else "ABC"))


@broken("5 weights: term 2 begins with liars only")
def a_term_with_liars_only(breaks: bool) -> None:
    """Which nobody has asked for: its coordinator is a required one."""
    stage = Stage(mode="required", liars=1, lies=("FalseOwner",))
    start = stage.begun()
    stage.world.now = 100.0
    stage.world.asked_at = stage.world.now - ANSWERED_S - (1.0 if breaks else 0.0)
    stage.show(stage.start(start, "C"))


@broken("5 weights: term 2 begins with liars only")
def a_term_with_one_liar_of_three(breaks: bool) -> None:
    stage = Stage(mode="required", liars=1, lies=("FalseOwner",))
    start = stage.begun("WABC" if breaks else "WBC")
    stage.show(stage.start(start, "C"))


@broken("5 weights: term 3 begins with liars only")
def a_term_with_a_liar_of_a_group_that_has_lately_shrunk(breaks: bool) -> None:
    stage = Stage(mode="required", liars=1, lies=("FalseOwner",))
    start = stage.begun("WABC")
    shrunk = stage.commit("B", stage.start(start, "BC"))
    for _ in range(0 if breaks else 8):
        shrunk = stage.round(shrunk, "B", voters="BCW")
    if breaks:
        stage.show(stage.start(shrunk, "C", term=3, boot=3))
    else:
        stage.show(stage.start(shrunk, "C"))


@broken("5 weights: term 2 begins with liars only")
def a_term_that_honest_members_give_away(breaks: bool) -> None:
    stage = Stage(mode="required", liars=1 if breaks else 3, lies=("FalseOwner",))
    stage.show(stage.start(stage.show(stage.start(GENESIS, "ABC")), "C"))


@broken("only liars have answered")
def a_witness_term_with_liars_only(breaks: bool) -> None:
    stage = Stage(liars=1)
    stage.show(stage.start(stage.begun(), "C" if breaks else "BC"))
