"""`peer status` and `peer doctor` of a model that real servers serve."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trio

from cli.checks.served_model import blocks_finding, round_trip_finding
from tests.support.forking.command import peer_meanwhile
from tests.support.peer_process import POLL_S
from tests.swarm.serving.serving_swarm import LAYERS, ServingSwarm, open_serving


async def peer(swarm: ServingSwarm, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    """Run a command; return its exit code, its lines of JSON, and what it wrote on standard error."""
    done = await peer_meanwhile(*arguments[:1], str(swarm.invite), *arguments[1:], "--json")
    return done.returncode, [json.loads(line) for line in done.stdout.splitlines()], done.stderr


@pytest.mark.process
async def test_a_served_model_is_looked_at(tmp_path: Path) -> None:
    async with open_serving(tmp_path, s0="0:3", s1="3:6") as swarm:
        async with swarm.client():
            pass  # waits until both are known
        code, (seen,), error = await peer(swarm, "status")
        assert code == 0, error
        servers = [member["claims"] for member in seen["members"]]
        assert [(s["name"], s["first"], s["end"], s["phase"]) for s in servers] == [
            ("s0", 0, 3, "serving"),
            ("s1", 3, 6, "serving"),
        ]
        assert all(set(s["wire"]) == {"fp32", "bf16", "int8"} and s["kv_used"] < 1 for s in servers)
        assert seen["troubles"] == []
        code, (planned,), error = await peer(swarm, "plan", "--serve", "--host-memory", "2GB")
        assert code == 0 and (planned["layers"], planned["dtype"], planned["fits"]) == (LAYERS, "fp32", True), error
        code, findings, error = await peer(swarm, "doctor", "--home", str(tmp_path / "looking"))
        told = {found["check"]: found for found in findings}
        trips = [found["detail"] for found in findings if found["check"] == "round trip"]
        assert code == 0, (findings, error)
        assert told["blocks"]["detail"] == f"2 servers hold all {LAYERS} blocks" and told["memory"]["state"] == "ok"
        assert sorted(trip[:2] for trip in trips) == ["s0", "s1"]
        assert all("alone" in trip and "while the servers compute a prompt" in trip for trip in trips)

        swarm.servers["s1"].kill()
        with trio.fail_after(120):
            while not (seen := (await peer(swarm, "status"))[1][0])["troubles"]:
                await trio.sleep(10 * POLL_S)
        assert seen["troubles"] == ["no server holds blocks 3 to 5"]
        code, findings, _ = await peer(swarm, "doctor", "--home", str(tmp_path / "looking"))
        told = {found["check"]: found for found in findings}
        assert code == 3 and told["blocks"]["detail"] == "no server holds blocks 3 to 5"
        assert told["prompt"]["state"] == "failure" and "no server holds blocks 3 to 5" in told["prompt"]["detail"]


def test_what_is_wrong_with_a_model_has_a_remedy() -> None:
    assert blocks_finding([], 3, 8).state == "ok"
    found = blocks_finding(["no server holds block 7", "all that hold block 8 are full"], 3, 8)
    assert (found.state, found.exit_code) == ("failure", 3) and "block 7; all" in found.detail and found.remedy


def test_round_trips_are_told_alone_and_under_load() -> None:
    assert round_trip_finding("a", 3.0, 20.0).state == "ok"
    assert round_trip_finding("a", 3.0, None).detail == "a 3.0 ms alone"
    slow = round_trip_finding("a", 3.0, 400.0)
    assert slow.state == "warning" and "400.0 ms while" in slow.detail and "--wire" in slow.remedy
    assert round_trip_finding("a", None, None).state == "warning"
