"""The benchmark of the agreement's traffic counts what its nodes send."""

from __future__ import annotations

from benchmarks.agreement.traffic import BEYOND_S, ROUND_S, measure


def test_a_group_of_ten_in_two_rounds() -> None:
    found = measure(10, 2)
    assert abs(found["round_s"] - ROUND_S) < BEYOND_S
    assert found["bytes"] == sum(found["kinds"].values()) or abs(found["bytes"] - sum(found["kinds"].values())) < 20
    assert {"plan", "roster", "status", "vote", "chain"} <= set(found["kinds"])
    assert 2 * found["limit_bytes"] < found["bytes"] and found["bytes"] / 10 < found["busiest_bytes"]
    assert found["signed_a_node"] >= 2, "a contribution and a vote"
    assert found["checked_a_node"] >= 10 + 6, "those of all, and a quorum's votes"
    assert 1 < found["records_a_node"] < 4
