"""Routes: the least sum of all chains of servers, however they overlap; and which servers are left out."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

from hypothesis import given
from hypothesis import strategies as st

from peer.ipc.sampling_options import OPTIONS, Sampling
from swarm.inference.client_view import ServersView
from swarm.inference.record import ServerRecord, SessionNeeds
from swarm.inference.route import HOP_MS, Hop, RouteView, find_route, uncovered

NOW = 1000.0


def server(first: int, end: int, **fields: Any) -> ServerRecord:
    plain: dict[str, Any] = {
        "session": "s",
        "name": "n",
        "version": "1",
        "addresses": [],
        "joined_at": 1.0,
        "at": NOW,
        "first": first,
        "end": end,
        "pages": 10,
        "pages_free": 10,
        "step_ms": float(end - first),
    }
    return ServerRecord(**{**plain, **fields})


def view(blocks: int, servers: dict[str, ServerRecord], ways: dict[str, float] | None = None) -> RouteView:
    return RouteView(blocks, servers, NOW, (ways or {}).get)


async def test_a_route_uses_only_servers_that_take_the_type_on_the_wire() -> None:
    """An older server says nothing of types: it takes the model's own."""
    servers = ServersView(cast(Any, None), cast(Any, None), "run", 4)
    servers.records = {
        "old": server(0, 4, step_ms=0.1),
        "new": server(0, 4, step_ms=50.0, wire=("fp32", "int8", "of tomorrow"), ready_at=0.0),
    }
    assert servers.plan(()) == (Hop("old", 0, 4),)
    assert servers.plan((), needs=SessionNeeds("int8")) == (Hop("new", 0, 4),)
    assert servers.plan((), needs=SessionNeeds("bf16")) is None
    assert "bf16" in servers.missing("", SessionNeeds("bf16"))
    assert "bf16" not in servers.missing("", SessionNeeds("int8"))


async def test_a_server_that_would_ignore_the_penalties_draws_no_token_with_them() -> None:
    """One of an older version drops the settings that it does not know; before the last block that does no harm."""
    servers = ServersView(cast(Any, None), cast(Any, None), "run", 4)
    old, needs = server(0, 4, step_ms=0.1), SessionNeeds(options=Sampling(presence_penalty=1.0).options)
    masked = SessionNeeds(options=Sampling(masked=True).options)
    assert not server(0, 4, options=("penalties",)).takes(masked, 4) and server(0, 4, options=OPTIONS).takes(masked, 4)
    assert server(0, 3).takes(masked, 4), "it draws no tokens"
    servers.records = {"old": old, "old too": server(0, 2)}
    assert servers.plan(()) == (Hop("old", 0, 4),)
    assert servers.plan((), needs=needs) is None and "logit_bias: ask without" in servers.missing("", needs)
    assert "knows response_format: ask without" in servers.missing("", masked)
    assert "logit_bias" not in servers.missing("")
    servers.records = {**servers.records, "new": server(2, 4, step_ms=50.0, options=("penalties", "of tomorrow"))}
    assert servers.plan((), needs=needs) == (Hop("old too", 0, 2), Hop("new", 2, 4))
    assert "logit_bias" not in servers.missing("", needs)


def no_chance() -> float:
    return 0.0


def chains(blocks: int, servers: dict[str, ServerRecord], at: int = 0) -> list[list[str]]:
    """Return every chain of servers through all blocks, by trying all."""
    if at == blocks:
        return [[]]
    found = []
    for peer, record in servers.items():
        if record.first <= at < record.end:
            borders = {r.first for r in servers.values() if at < r.first < record.end} | {record.end}
            for to in borders:
                found += [[f"{peer} {at} {to}", *rest] for rest in chains(blocks, servers, to)]
    return found


spans = st.tuples(st.integers(0, 5), st.integers(1, 6)).filter(lambda s: s[0] < s[1])


@given(st.lists(spans, min_size=1, max_size=5), st.lists(st.floats(0.1, 20), min_size=5, max_size=5))
def test_the_quickest_of_all_chains_is_found(spans: list[tuple[int, int]], ways: list[float]) -> None:
    servers = {f"p{i}": server(first, end) for i, (first, end) in enumerate(spans)}
    way = {peer: ways[i] for i, peer in enumerate(servers)}

    def cost(chain: list[str]) -> float:
        total = 0.0
        for peer, first, end in (edge.split() for edge in chain):
            total += way[peer] + (int(end) - int(first))  # a block takes 1 ms everywhere
        return total

    costs = [cost(chain) for chain in chains(6, servers)]
    route = find_route(view(6, servers, way), no_chance)
    assert (route is None) == (not costs)
    if route is not None:
        assert [hop.first for hop in route] == [0, *(hop.end for hop in route[:-1])] and route[-1].end == 6
        assert abs(cost([f"{hop.peer} {hop.first} {hop.end}" for hop in route]) - min(costs)) < 1e-9


def test_servers_that_are_full_leaving_absent_or_slow_are_passed_over() -> None:
    good = server(0, 4)
    for bad in (
        server(0, 4, leaving=True),
        server(0, 4, ready_at=NOW + 9),
        server(0, 4, pages_free=0),
        server(0, 4, step_ms=40.0),
        server(0, 4, waiting_tokens=5000),
    ):
        assert find_route(view(4, {"bad": bad, "good": good}), no_chance) == (Hop("good", 0, 4),)
    assert find_route(view(4, {"good": good}), no_chance, without=["good"]) is None
    assert uncovered(view(6, {"good": good, "late": server(4, 6, ready_at=NOW + 9)})) == [4, 5]


def test_a_gap_is_filled_by_several_servers() -> None:
    servers = {"a": server(2, 4), "b": server(4, 6), "whole": server(0, 6)}
    route = find_route(view(6, servers), no_chance, first=2, end=6, without=["whole"])
    assert route == (Hop("a", 2, 4), Hop("b", 4, 6))


def test_a_claimer_counts_at_most_as_a_few_times_the_median() -> None:
    honest = {f"h{i}": server(0, 8, step_ms=8.0) for i in range(4)}
    claimer = {"claimer": server(0, 8, step_ms=1e-6)}
    ways = {**dict.fromkeys(honest, 0.1), "claimer": 7.0}  # it would gain 8 ms by its word alone
    route = find_route(view(8, {**honest, **claimer}, ways), no_chance)
    assert route is not None and route[0].peer != "claimer"


def test_clients_with_equal_views_choose_different_servers() -> None:
    servers = {f"p{i}": server(0, 4) for i in range(4)}
    numbers = iter([((7 * i) % 11) / 11 for i in range(1000)])
    chosen = [route[0].peer for _ in range(60) if (route := find_route(view(4, servers), lambda: next(numbers)))]
    assert len(chosen) == 60 and len(set(chosen)) == 4
    assert any(one != other for one, other in pairwise(chosen))


def test_a_far_server_is_not_worth_its_speed() -> None:
    servers = {"near": server(0, 8, step_ms=10.0), "far": server(0, 8, step_ms=4.0)}
    assert find_route(view(8, servers, {"near": HOP_MS, "far": 50.0}), no_chance) == (Hop("near", 0, 8),)
    assert find_route(view(8, servers, {"near": HOP_MS, "far": 2.0}), no_chance) == (Hop("far", 0, 8),)


def test_no_server_comes_twice() -> None:
    servers = {
        "slow": server(0, 9, step_ms=90.0),
        "quick": server(3, 6, step_ms=3.0),
        "x": server(0, 1),
        "y": server(8, 9),
    }
    ways = dict.fromkeys(servers, 0.01)
    for seed in range(20):
        numbers = iter([((seed + 3 * i) % 7) / 7 for i in range(1000)])
        route = find_route(view(9, servers, ways), numbers.__next__)
        assert route is not None and len({hop.peer for hop in route}) == len(route)
        assert [hop.first for hop in route] == [0, *(hop.end for hop in route[:-1])] and route[-1].end == 9
