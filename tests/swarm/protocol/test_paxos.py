"""At most one head is chosen, in every order of prepares and votes, with any minority silent at any time."""

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol.head import TRIES_PER_LEADER, Head, Member, genesis
from swarm.protocol.paxos import Acceptor, VoteCount, value_to_finish

MEMBERS = tuple(Member(f"peer{i}", "s") for i in range(5))


def head_with(members: tuple[Member, ...]) -> Head:
    return genesis("run", b"state").regrouped(members, 1)


def candidate(base: Head, name: bytes) -> Head:
    import msgspec

    return msgspec.structs.replace(base, round=base.round + 1, previous=base.hash, state_hash=name)


steps = st.lists(
    st.tuples(
        st.integers(0, 6),  # attempt
        st.sets(st.integers(0, 4)),  # members that receive the prepare
        st.lists(st.integers(0, 4), max_size=5),  # members that vote, in this order
    ),
    max_size=25,
)


@settings(max_examples=400, deadline=None)
@given(steps)
def test_two_heads_are_never_both_chosen(schedule: list[tuple[int, set[int], list[int]]]) -> None:
    base = head_with(MEMBERS)
    acceptors = [Acceptor() for _ in MEMBERS]
    votes = VoteCount(base)
    led: dict[int, Head] = {}
    chosen: set[bytes] = set()
    for attempt, hears, voters in schedule:
        if attempt not in led:
            promised = [acceptors[i] for i in hears if acceptors[i].promise(attempt)]
            if len(promised) < base.quorum:
                continue
            unfinished = value_to_finish([acceptor.accepted for acceptor in promised], len(MEMBERS))
            led[attempt] = unfinished.head if unfinished else candidate(base, b"from %d" % attempt)
        for i in voters:
            if acceptors[i].accept(attempt, led[attempt], b""):
                votes.record(MEMBERS[i], attempt, led[attempt].hash)
            if votes.chosen is not None:
                chosen.add(votes.chosen)
    assert len(chosen) <= 1


def test_a_minority_and_non_members_choose_nothing() -> None:
    base = head_with(MEMBERS[:4])
    votes = VoteCount(base)
    votes.record(MEMBERS[0], 0, b"x")
    votes.record(MEMBERS[1], 0, b"x")
    votes.record(MEMBERS[4], 0, b"x")
    votes.record(Member("peer2", "restarted"), 0, b"x")
    assert votes.chosen is None, "2 of 4 is no majority"
    votes.record(MEMBERS[2], 1, b"x")
    assert votes.chosen is None, "votes of different attempts do not add up"
    votes.record(MEMBERS[2], 0, b"x")
    assert votes.chosen == b"x"


def test_leaders_rotate_and_suspects_are_skipped() -> None:
    base = head_with(MEMBERS)
    leaders = {base.leader(attempt) for attempt in range(0, TRIES_PER_LEADER * 5, TRIES_PER_LEADER)}
    assert leaders == set(MEMBERS)
    first = base.leader(0).peer
    attempt = base.next_attempt(0, frozenset({first}))
    assert base.leader(attempt).peer != first and attempt == TRIES_PER_LEADER


def test_heads_are_named_by_their_content_and_chained() -> None:
    base = head_with(MEMBERS)
    assert base.hash == head_with(MEMBERS).hash
    assert candidate(base, b"a").hash != candidate(base, b"b").hash
    assert candidate(base, b"a").previous == base.hash
