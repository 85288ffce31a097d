"""What a leader is said to send ahead is about what the simulated one sends."""

from __future__ import annotations

import json

import pytest

from benchmarks.agreement.traffic_rows import section
from benchmarks.common.options import RESULTS
from swarm.protocol.leader_bytes import leader_bytes

GROUPS = {
    group["members"]: group for group in json.loads((RESULTS / "agreement" / "traffic.json").read_text())["figures"]
}


@pytest.mark.parametrize("members", GROUPS)
def test_it_is_about_what_was_measured(members: int) -> None:
    """Numbers in it are counted as long as they can be. In a group of 256 not all have said yet in the few rounds that
    were measured that they take packed messages."""
    measured = GROUPS[members]["busiest_bytes"]
    assert 0.8 * measured <= leader_bytes(members, slices=4, round_s=20.0) <= 1.5 * measured


def test_it_grows_with_members_slices_and_time() -> None:
    of = leader_bytes
    assert of(4, 4, 20) < of(8, 4, 20) < of(64, 4, 20) < of(64, 64, 20) < of(256, 64, 20) < of(256, 64, 600)
    assert of(64, 64, 20) < of(64, 64, 20, pipeline=True)


def test_a_members_bytes_at_64_are_at_most_twice_those_at_16() -> None:
    assert GROUPS[64]["bytes"] / 64 <= 2 * GROUPS[16]["bytes"] / 16
    assert "(bar 2)" in section(list(GROUPS.values()))
