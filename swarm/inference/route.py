"""The route of a session through servers: the quickest way from block 0 to the last one. Pure.

The borders between blocks are the nodes of a graph, and each server's blocks, or their end, an edge. An edge costs the
way to the server, the tokens that wait there, and its measured time for these blocks (Dijkstra 1959). Each cost is
raised at random by up to a tenth, so that clients with equal views do not all take the same servers.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from swarm.inference.messages import StartSession
from swarm.inference.record import ServerRecord

SPREAD: Final = 0.1
BLOCK_MS: Final = 0.5
"""The time of a block at a server that has not measured it."""
LEAD_MAX: Final = 4.0
"""No server counts as more than this many times as fast as the median."""
HOP_MS: Final = 1.0
"""The cost of a hop where the way to the server was not measured."""
FULL_MS: Final = 1000.0
"""The extra cost of a server without free pages now."""


@dataclass(frozen=True)
class Hop:
    """A server on a route, and the blocks that it computes there."""

    peer: str
    first: int
    end: int


Route = tuple[Hop, ...]


def placed(start: StartSession, route: Route, index: int) -> StartSession:
    """Return what one server of a route is sent of a session that starts: with its blocks and its neighbours."""
    hop, source, target = route[index], route[index - 1].peer, route[(index + 1) % len(route)].peer
    return msgspec.structs.replace(start, first=hop.first, end=hop.end, source=source, target=target)


@dataclass(frozen=True)
class RouteView:
    """A client's view of the servers."""

    blocks: int
    """Of the model."""
    servers: Mapping[str, ServerRecord]
    now: float
    """Unix time."""
    way_ms: Callable[[str], float | None]
    """The measured one-way time to a server; None if there is none."""
    penalty_ms: Callable[[str], float] = lambda peer: 0.0
    """The cost that this client adds to a server's, from its own experience."""


def find_route(
    view: RouteView, chance: Callable[[], float], *, first: int = 0, end: int | None = None, without: Iterable[str] = ()
) -> Route | None:
    """Return a quick route through blocks [first, end) (None: the last block), or None if some block has no server.
    `without`: servers not to use. `chance` gives numbers in [0, 1)."""
    last = view.blocks if end is None else end
    avoided = frozenset(without)
    usable = {
        peer: record
        for peer, record in view.servers.items()
        if peer not in avoided and record.serves(view.now) and not record.leaving and record.first < view.blocks
    }
    floor_ms = _floor(usable.values())
    costs = {peer: _Cost.of(peer, record, view, floor_ms, 1 + SPREAD * chance()) for peer, record in usable.items()}
    best: dict[int, float] = {first: 0.0}
    came: dict[int, tuple[int, str]] = {}
    waiting = [(0.0, first)]
    done = set[int]()
    while waiting:
        spent, at = heapq.heappop(waiting)
        if at in done:
            continue
        if at == last:
            return _walk(came, first, last)
        done.add(at)
        for peer, record in usable.items():
            if not record.first <= at < record.end:
                continue
            for to in _borders(at, min(record.end, last), usable.values()):
                cost = spent + costs[peer].edge(to - at)
                if cost < best.get(to, float("inf")):
                    best[to], came[to] = cost, (at, peer)
                    heapq.heappush(waiting, (cost, to))
    return None


def foretold_ms(view: RouteView, route: Route) -> float:
    """Return what a token takes on a route by what its servers say and the ways to them."""
    floor_ms, known = _floor(view.servers.values()), replace(view, penalty_ms=lambda peer: 0.0)
    hops = [(hop, view.servers[hop.peer]) for hop in route if hop.peer in view.servers]
    return sum(_Cost.of(hop.peer, record, known, floor_ms, 1.0).edge(hop.end - hop.first) for hop, record in hops)


def uncovered(view: RouteView, without: Iterable[str] = ()) -> list[int]:
    """Return the blocks that no server serves now."""
    avoided = frozenset(without)
    served = {
        block
        for peer, record in view.servers.items()
        if peer not in avoided and record.serves(view.now) and not record.leaving
        for block in range(record.first, min(record.end, view.blocks))
    }
    return [block for block in range(view.blocks) if block not in served]


@dataclass(frozen=True)
class _Cost:
    hop_ms: float
    block_ms: float

    @classmethod
    def of(cls, peer: str, record: ServerRecord, view: RouteView, floor_ms: float, factor: float) -> _Cost:
        way_ms = view.way_ms(peer)
        block_ms = max(floor_ms, _block_ms(record))
        waiting_ms = block_ms * (record.end - record.first) * min(record.waiting_tokens, 1 << 16) / 64
        full_ms = FULL_MS if record.pages and not record.pages_free else 0.0
        hop_ms = (HOP_MS if way_ms is None else way_ms) + waiting_ms + full_ms + view.penalty_ms(peer)
        return cls(factor * hop_ms, factor * block_ms)

    def edge(self, blocks: int) -> float:
        return self.hop_ms + blocks * self.block_ms


def _block_ms(record: ServerRecord) -> float:
    return record.step_ms / (record.end - record.first) if record.step_ms > 0 else BLOCK_MS


def _floor(records: Iterable[ServerRecord]) -> float:
    """Return the least time of a block that is believed."""
    times = sorted(map(_block_ms, records))
    return times[len(times) // 2] / LEAD_MAX if times else 0.0


def _borders(at: int, end: int, records: Iterable[ServerRecord]) -> set[int]:
    """Return where a server's part may end: at its last block, or where another's blocks begin."""
    return {end, *(record.first for record in records if at < record.first < end)}


def _walk(came: Mapping[int, tuple[int, str]], first: int, last: int) -> Route:
    hops, at = list[Hop](), last
    while at != first:
        before, peer = came[at]
        hops.append(Hop(peer, before, at))
        at = before
    return _once_each(hops[::-1])


def _once_each(hops: Sequence[Hop]) -> Route:
    """Return the route with each server once: what lies between two parts at one server, it computes, too."""
    route = list[Hop]()
    for hop in hops:
        places = [place for place, other in enumerate(route) if other.peer == hop.peer]
        if places:
            hop = Hop(hop.peer, route[places[0]].first, hop.end)
            del route[places[0] :]
        route.append(hop)
    return tuple(route)
