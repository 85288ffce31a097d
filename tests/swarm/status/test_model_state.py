"""The state and the verdict of a served model, from fixtures: 4 blocks."""

from __future__ import annotations

from swarm.status.state import MonitorState
from tests.swarm.status.scenes import NOW, model_shown, server, told


def said(state: MonitorState) -> str:
    return f"{state.verdict.word}: {state.verdict.reason}"


def test_without_servers() -> None:
    state = model_shown({})
    assert said(state) == "everybody away: no server of this model publishes a record"
    assert [(row.first, row.end, row.servers) for row in state.blocks] == [(0, 4, 0)]


def test_blocks_without_a_server_are_named() -> None:
    state = model_shown({"a": server(0, 2), "b": server(1, 3)})
    assert said(state) == "stopped: blocks 3 to 3 have no server, so no text can be generated"
    assert state.verdict.remedy == "start one with `peer serve INVITE --blocks 3:4`"
    assert [(row.first, row.end, row.servers) for row in state.blocks] == [(0, 1, 1), (1, 2, 2), (2, 3, 1), (3, 4, 0)]


def test_blocks_that_are_about_to_be_served() -> None:
    state = model_shown({"a": server(0, 2), "b": server(2, 4, ready_at=NOW + 5)})
    assert said(state) == "waiting: blocks 2 to 3 have no server yet, and 1 about to be ready"
    assert [member.claims.phase for member in state.members if member.claims] == ["serving", "loading"]


def test_blocks_with_one_server_are_at_the_edge() -> None:
    both = {"a": server(0, 4, pages=8, pages_free=2), "b": server(0, 2)}
    state = model_shown(both)
    assert state.verdict.level == "edge" and "blocks 2 to 3 have one server only" in said(state)
    claims = state.members[0].claims
    assert claims is not None and claims.kv_used == 0.75
    assert model_shown(both | {"c": server(2, 9)}).verdict.level == "good"
    assert model_shown(both | {"c": server(2, 4, leaving=True)}).verdict.level == "edge"


def test_strangers_records_and_events_are_bounded() -> None:
    crowd = {f"s{n:05}": server(n % 6, n % 6 + 1 + n % 3) for n in range(10_000)}
    state = model_shown(crowd, told={"s00001": [told("worker_died")] * 500})
    assert len(state.members) == 256 and state.monitor.members_left_out == 10_000 - 256
    assert max(len(row.peers) for row in state.blocks) <= 256


def test_the_status_of_a_model_shows_its_servers_in_order_and_who_holds_what() -> None:
    records = {
        "p1": server(2, 4, name="b", ready_at=NOW + 4),
        "p2": server(0, 3, name="a", sessions=2, pages=8, pages_free=7, step_ms=3.0, wire=("int8",)),
    }
    seen = model_shown(records)
    claims = [member.claims for member in seen.members if member.claims is not None]
    assert [(c.name, c.phase, c.ready_in_s, c.sessions, c.age_s, c.wire) for c in claims] == [
        ("a", "serving", 0.0, 2, 1.0, ("int8",)),
        ("b", "loading", 4.0, 0, 1.0, ()),
    ]
    assert [(row.first, row.end, row.servers, row.peers) for row in seen.blocks] == [
        (0, 2, 1, ("p2",)),
        (2, 3, 1, ("p1", "p2")),
        (3, 4, 0, ("p1",)),
    ]
    assert seen.troubles == ("those that are to hold block 3 are not ready yet",)
