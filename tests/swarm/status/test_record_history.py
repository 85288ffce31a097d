"""Losses that peers claim for rounds, of which some are invented."""

from __future__ import annotations

from swarm.status.record_history import AHEAD_MAX, ROUNDS_MAX, RecordHistory, last_round
from tests.swarm.placement.test_stage_choice import record

REACHED = 40
INVENTED = [10**6 + number for number in range(2 * ROUNDS_MAX)]


def filled(gossip: bool, proved: list[int], invented: list[int]) -> RecordHistory:
    """The history of three honest peers, and of one that claims another round at each reading."""
    history = RecordHistory()
    for number in [*range(1, REACHED + 1), *[REACHED] * len(invented)]:
        claimed = invented[0] if number < REACHED else invented.pop(0) if invented else 1
        records = {peer: record(0, round=number, loss=1.0 + number) for peer in "abc"}
        records["liar"] = record(0, round=claimed, loss=9.0)
        history.note_losses(records, last_round(records, proved, gossip))
    return history


def test_invented_rounds_displace_no_proved_one() -> None:
    history = filled(False, [REACHED], list(INVENTED))
    assert all(history.losses[number]["a"] == 1.0 + number for number in range(1, REACHED + 1))
    assert max(history.losses) == REACHED


def test_invented_rounds_of_gossip_displace_none_of_many_peers() -> None:
    near = [REACHED + 1 + number for number in range(2 * ROUNDS_MAX)]
    history = filled(True, [], near)
    assert all(history.losses[number]["a"] == 1.0 + number for number in range(1, REACHED + 1))
    assert max(history.losses) == REACHED + AHEAD_MAX


def test_a_round_after_the_proved_one_counts() -> None:
    records = {"a": record(0, round=8, loss=2.0)}
    assert last_round(records, [5, 7], gossip=False) == 8
    assert last_round({}, [], gossip=False) == 0
