"""Each invariant of a run's history is noticed when the events of its peers break it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.simulation.histories.checks import check_histories

Line = tuple[str, dict[str, Any]]


def head(name: str, previous: str, round: int, term: int = 1, merged: bool = True, **more: Any) -> Line:
    fields = {"round": round, "term": term, "head": name, "previous": previous, "state_hash": f"state of {name}"}
    fields |= {"members": 3, "tokens": 100 * round}
    return "round_committed" if merged else "head_adopted", fields | more


def start(name: str, previous: str, round: int, term: int, **more: Any) -> Line:
    state = f"state of {previous}"
    return head(name, previous, round, term, merged=False, **{"state_hash": state} | more)


def seen(round: int) -> Line:
    return "head_seen", {"round": round, "members": 3}


def regrouped(term: int, round: int, undone: int = 0) -> Line:
    return "regrouped", {"term": term, "round": round, "members": 2, "undone": undone}


BEGUN = start("start", "first", 0, 1)
ROUNDS = [BEGUN, head("one", "start", 1), head("two", "one", 2)]


def check(folder: Path, wiped: tuple[str, ...] = (), **peers: list[Line]) -> None:
    """Write the events of these peers, and judge them."""
    for peer, lines in peers.items():
        (folder / peer).mkdir(exist_ok=True)
        texts = [json.dumps({"at": 1.0, "event": event, **fields}) for event, fields in lines]
        (folder / peer / "events.jsonl").write_text("\n".join(texts) + "\n")
    check_histories([folder / peer for peer in peers], wiped)


def test_a_whole_history_holds(tmp_path: Path) -> None:
    """B was away for a round, and C joined late; a second term goes on where the first one ended."""
    again = [start("start 2", "two", 2, 2, tokens=200), head("three", "start 2", 3, 2)]
    check(
        tmp_path,
        W=[regrouped(1, 0), regrouped(2, 2)],
        A=ROUNDS + again,
        B=[
            BEGUN,
            ("run_entered", {}),
            head("two", "one", 2, merged=False),
            head("three", "start 2", 3, 2, merged=False),
        ],
        C=again,
    )


def test_the_older_part_of_a_rotated_file_counts(tmp_path: Path) -> None:
    check(tmp_path, A=ROUNDS)
    (tmp_path / "A" / "events.jsonl").rename(tmp_path / "A" / "events.1.jsonl")
    with pytest.raises(AssertionError, match="agreement"):
        check(tmp_path, A=[head("three", "two", 3)], B=[head("another two", "one", 2)])


@pytest.mark.parametrize(
    ("invariant", "first", "second"),
    [
        ("agreement: one head is two", ROUNDS, [head("one", "start", 1, state_hash="of another one")]),
        ("agreement: two heads at", ROUNDS, [head("another one", "other", 1)]),
        ("agreement: two heads follow", ROUNDS, [head("another one", "start", 3)]),
        ("lineage: .* is not the round after", ROUNDS, [head("four", "two", 4)]),
        ("lineage: .* of a higher term", ROUNDS, [head("nought", "one", 9, term=0)]),
        ("lineage: .* at another round", ROUNDS, [start("start 2", "two", 1, 2)]),
        ("lineage: .* changes the state", ROUNDS, [start("start 2", "two", 2, 2, state_hash="other", tokens=200)]),
        ("lineage: .* takes part in", ROUNDS, [BEGUN, head("two", "one", 2)]),
        ("electorate", ROUNDS, [head("three", "two", 3, members=5)]),
        ("counted once: a round takes tokens back", ROUNDS, [head("three", "two", 3, tokens=100)]),
        ("monotone", ROUNDS, [*ROUNDS, ("run_entered", {}), head("one", "start", 1, merged=False)]),
        ("monotone", ROUNDS, [*ROUNDS, head("two", "one", 2)]),
        ("a bug", ROUNDS, [("bug", {"error": "KeyError"})]),
    ],
)
def test_a_history_that_breaks_an_invariant_is_noticed(
    tmp_path: Path, invariant: str, first: list[Line], second: list[Line]
) -> None:
    check(tmp_path, A=first)
    with pytest.raises(AssertionError, match=invariant):
        check(tmp_path, A=first, B=second)


def test_a_round_is_left_only_where_a_start_takes_it_back(tmp_path: Path) -> None:
    left = [*ROUNDS, start("start 2", "one", 1, 2, tokens=100)]
    check(tmp_path, A=left, W=[regrouped(1, 0), seen(2), regrouped(2, 1, undone=1)])
    with pytest.raises(AssertionError, match="one commit a round"):
        check(tmp_path, A=left, W=[regrouped(1, 0), seen(2), regrouped(2, 1)])
    check(tmp_path, A=left, W=[regrouped(1, 0), seen(2), ("coordinator_restored", {}), regrouped(2, 1)])
    check(tmp_path, A=left, W=[regrouped(1, 0), seen(1), regrouped(2, 1)])


def test_only_a_peer_whose_disk_was_lost_begins_again(tmp_path: Path) -> None:
    again = [*ROUNDS, ("run_entered", {}), head("one", "start", 1, merged=False), head("two", "one", 2)]
    check(tmp_path, wiped=("B",), A=ROUNDS, B=again)
    with pytest.raises(AssertionError, match="monotone"):
        check(tmp_path, A=ROUNDS, B=again)


def test_samples_of_a_stage_are_merged_once(tmp_path: Path) -> None:
    first = head("one", "start", 1, stage=1, counted=["0-8,16-24", "8-16"])
    check(
        tmp_path,
        A=[first, head("two", "one", 2, stage=1, counted=["24-32"])],
        B=[head("one of 0", "start of 0", 1, stage=0)],
    )
    with pytest.raises(AssertionError, match="8 samples of stage 1 are merged twice"):
        check(tmp_path, A=[first, head("two", "one", 2, stage=1, counted=["24-32,0-8"])])
