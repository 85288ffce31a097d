"""The ledger loses no sample and assigns none twice."""

from hypothesis import given, settings
from hypothesis import strategies as st

from swarm.protocol.ledger import Ledger, Range, common, contains, count, head_of, overlaps


def samples(ranges: list[Range] | tuple[Range, ...]) -> list[int]:
    return [i for first, last in ranges for i in range(first, last)]


rounds = st.lists(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 20)), min_size=1, max_size=5), max_size=8)


@settings(deadline=None)
@given(rounds)
def test_every_sample_is_committed_once_or_free(plan: list[list[tuple[int, int]]]) -> None:
    ledger, committed = Ledger(), []
    for contributors in plan:
        assigned = ledger.assign([wanted for wanted, _ in contributors])
        assert not overlaps({str(i): r for i, r in enumerate(assigned)})
        consumed = [head_of(r, did) for r, (_, did) in zip(assigned, contributors, strict=True)]
        committed += [i for ranges in consumed for i in samples(ranges)]
        ledger = ledger.settle(assigned, consumed)
    assert len(committed) == len(set(committed))
    outstanding = samples(ledger.returned)
    assert sorted(committed + outstanding) == list(range(ledger.cursor))


def test_the_oldest_ranges_are_given_up_and_declared_lost() -> None:
    ledger = Ledger(90, tuple((10 * k, 10 * k + 4) for k in range(9)))
    less = ledger.without_oldest(at=43, most=2)
    assert less == Ledger(90, ((30, 34), (40, 44), (50, 54), (60, 64), (70, 74), (80, 84)), lost=12)
    assert ledger.ranges_from(43) == 4 and ledger.ranges_from(40) == 5
    for at, most in ((0, 0), (90, 9), (43, 5)):
        assert ledger.without_oldest(at, most) == ledger


def test_at_the_end_a_later_stage_has_settled_what_the_first_one_has() -> None:
    first = Ledger(100, ((40, 50), (80, 90)), lost=4)
    later = Ledger(90, ((0, 10), (44, 60)), lost=2)
    closed = later.closed(first)
    assert closed == Ledger(100, ((44, 50),), lost=2 + 10 + 10 + 10)
    assert not count(common(first.settled, closed.returned))
    assert Ledger(120, ((100, 110),)).closed(first) == Ledger(120, ((100, 110),)), "ahead of the first stage"


@settings(deadline=None)
@given(rounds)
def test_returned_samples_are_assigned_first(plan: list[list[tuple[int, int]]]) -> None:
    ledger = Ledger()
    for contributors in plan:
        assigned = ledger.assign([wanted for wanted, _ in contributors])
        if any(last > ledger.cursor for ranges in assigned for _, last in ranges):
            handed = samples([r for ranges in assigned for r in ranges])
            assert set(samples(ledger.returned)) <= set(handed)
        ledger = ledger.settle(assigned, [head_of(r, d) for r, (_, d) in zip(assigned, contributors, strict=True)])


rosters = st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=5, unique=True), min_size=1, max_size=8)


@settings(deadline=None)
@given(rosters, st.integers(1, 9))
def test_promises_are_kept_or_returned(present: list[list[int]], size: int) -> None:
    """In each round peers train on promised or new samples, and are promised as many more."""
    ledger, committed = Ledger(), []
    for peers in present:
        names = [str(peer) for peer in peers]
        fresh = [name for name in names if not ledger.promise(name)]
        handed = ledger.assign([size] * (len(fresh) + len(names)))
        work = {name: ledger.promise(name) for name in names} | dict(zip(fresh, handed, strict=False))
        ahead = dict(zip(names, handed[len(fresh) :], strict=True))
        committed += [i for ranges in work.values() for i in samples(ranges)]
        ledger = ledger.settle(work.values(), work.values(), ahead)
    assert len(committed) == len(set(committed))
    promised = [i for _, ranges in ledger.promised for i in samples(ranges)]
    assert sorted(committed + promised + samples(ledger.returned)) == list(range(ledger.cursor))


def test_a_discarded_round_leaves_the_ledger_as_it_was() -> None:
    ledger = Ledger(cursor=10, returned=((2, 4),))
    ledger.assign([5, 5])
    assert ledger == Ledger(cursor=10, returned=((2, 4),))


def test_head_of_takes_the_first_samples_in_order() -> None:
    assert head_of(((3, 5), (9, 20)), 4) == ((3, 5), (9, 11))
    assert count(head_of(((3, 5),), 9)) == 2


def test_contains_and_overlaps() -> None:
    assert contains([(0, 4), (4, 9)], [(2, 7)])
    assert not contains([(0, 4), (5, 9)], [(2, 7)])
    assert overlaps({"a": ((0, 3),), "b": ((2, 5),)})
    assert overlaps({"a": ((0, 3), (1, 2))})
