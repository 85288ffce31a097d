"""Each flood for a minute, at a peer of its own, which accepts, dials and holds nothing of it afterwards."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from peer.net.connection_counts import TELL_S
from tests.support.flood_scene import FLOODS, check_flood, open_scene
from tests.support.forking.command import peer

pytestmark = [pytest.mark.soak, pytest.mark.process]

EMPTY_S = 4 * TELL_S


@pytest.mark.parametrize("flood", FLOODS)
def test_a_minute_of_a_flood(tmp_path: Path, flood: str) -> None:
    with open_scene(tmp_path) as scene:
        home = tmp_path / "home"
        before = next_counts(home)
        check_flood(scene, flood, quiet_s=10.0, flood_s=60.0)
        end = time.monotonic() + EMPTY_S
        while left := above(next_counts(home), before):
            assert time.monotonic() < end, f"after {flood} the peer still holds {left}"
        accepted = peer("status", home / "invite")
        assert accepted.returncode == 0, accepted.stderr
        dialled = peer("doctor", home / "invite", "--home", tmp_path / "stranger", "--json")
        findings = {found["check"]: found for found in map(json.loads, dialled.stdout.splitlines())}
        assert findings["reachable"]["state"] == "ok", findings["reachable"]


def next_counts(home: Path) -> dict[str, int]:
    """Wait for the next report of the peer's counters, and return it."""
    log = home / "events.jsonl"
    seen, end = len(reports(log)), time.monotonic() + 3 * TELL_S
    while len(found := reports(log)) <= seen:
        assert time.monotonic() < end, "the peer reports no counters"
        time.sleep(0.5)
    return found[-1]


def reports(log: Path) -> list[dict[str, int]]:
    lines = [line for line in log.read_text().splitlines() if '"connections_counted"' in line and line.endswith("}")]
    return [json.loads(line)["counts"] for line in lines]


def above(counts: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    """Return the counters that are higher than the honest caller alone makes them."""
    return {name: count for name, count in counts.items() if count > before.get(name, 0)}
