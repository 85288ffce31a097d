"""The audit of a pipeline: what was counted twice and what was lost, from commits and ledgers."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cli.progress.micro_batch_audit import AuditEntry, AuditTotals, AuditTrail, audit
from swarm.protocol.ledger import Ledger


def test_commits_and_ledger_agree() -> None:
    assert audit([(0, 8), (8, 16), (24, 32)], Ledger(32, ((16, 24),))) == (0, 0, 0)


def test_a_sample_merged_twice() -> None:
    assert audit([(0, 8), (4, 16)], Ledger(16)) == (4, 0, 0)


def test_a_merged_sample_that_is_free_again_counts_as_twice() -> None:
    assert audit([(0, 8), (8, 16)], Ledger(16, ((8, 16),))) == (8, 0, 0)
    assert audit([(0, 8), (16, 24)], Ledger(16, ((8, 16),))) == (8, 0, 0)


def test_a_trained_sample_in_no_commit_is_lost() -> None:
    assert audit([(0, 8)], Ledger(24, ((8, 16),))) == (0, 8, 0)
    assert audit([(0, 8)], Ledger(24, ((8, 16),), lost=6)) == (0, 2, 0)


def test_samples_merged_by_other_stages_only_are_undone() -> None:
    trail = AuditTrail()
    trail.commit(0, AuditEntry("a", "genesis", (((0, 8),),)))
    trail.commit(1, AuditEntry("b", "genesis", (((0, 8), (16, 20)),)))
    trail.commit(1, AuditEntry("superseded", "b", (((20, 24), (24, 32)),)))
    merged = trail.merged(0, "genesis", "a")
    assert merged is not None
    assert audit(merged, Ledger(40, ((24, 32),)), trail.merged_elsewhere(0)) == (0, 16, 8)


@given(st.lists(st.tuples(st.integers(0, 40), st.integers(1, 9)), max_size=8), st.integers(0, 40), st.data())
def test_audit_counts_sample_by_sample(pieces: list[tuple[int, int]], cursor: int, data: st.DataObject) -> None:
    merged = [(first, first + size) for first, size in pieces]
    free = data.draw(st.sets(st.integers(0, cursor - 1))) if cursor else set[int]()
    times = [sum(first <= n < last for first, last in merged) for n in range(64)]
    trained = [n < cursor and n not in free for n in range(64)]
    both = list(zip(times, trained, strict=True))
    twice = sum(max(0, t - 1) + (t > 0 and not known) for t, known in both)
    missing = {n for n, (t, known) in enumerate(both) if known and not t}
    others = data.draw(st.sets(st.integers(0, 60)))
    found = audit(merged, Ledger(cursor, tuple((n, n + 1) for n in sorted(free))), [(n, n + 1) for n in sorted(others)])
    assert found == (twice, len(missing - others), len(missing & others))


def test_superseded_commits_are_left_out() -> None:
    trail = AuditTrail()
    trail.commit(1, AuditEntry("a", "genesis"))
    trail.commit(1, AuditEntry("b", "a", (((0, 8),), ((8, 16),))))
    trail.commit(1, AuditEntry("b", "a"))  # a peer that only fetched it
    trail.commit(1, AuditEntry("lost", "b", (((16, 24),),)))
    trail.commit(1, AuditEntry("c", "b", (((16, 32),),)))
    assert trail.merged(1, "genesis", "c") == [(16, 32), (0, 8), (8, 16)]
    assert trail.merged(1, "genesis", "d") is None and trail.merged(0, "genesis", "a") is None
    assert trail.merged(1, "another", "c") is None


def test_totals_add_up_over_restarts() -> None:
    totals = AuditTotals()
    for dispatched in (3, 10, 2, 5):
        totals.note({"dispatched": dispatched, "completed": dispatched - 1})
    assert (totals.of("dispatched"), totals.of("completed"), totals.of("retried")) == (15, 13, 0)
