"""Placement of a server: the blocks that it takes, and when it moves to others. Pure.

A server takes the blocks that are served worst: of all windows that it has room for, the one whose rates, sorted, come
first (as in Petals, 2209.01188). It moves where fewer blocks are then without a server, or where the worst block gains
by a margin that pays for the fetch; not soon after the last move, and one server at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from peer.ipc.span import Span
from swarm.inference.record import ServerRecord
from swarm.inference.route import BLOCK_MS

STAY_S: Final = 120.0
"""A server stays at its blocks for at least this long."""
LOOK_S: Final = 4.0
"""Between two looks at whether other blocks need a server more."""
GAIN_MIN: Final = 1.2
"""A move must raise the rate of the worst block by this factor, unless it covers blocks that no server has."""
MOVE_SHARE: Final = 0.1
"""This share of the servers that see the same reason to move at the same time do so."""
URGENT_SHARE: Final = 0.5
"""So many do where blocks have no server."""
SPARES_MIN: Final = 2
"""Blocks that a server leaves for better ones have this many other servers."""


@dataclass(frozen=True)
class PlacementView:
    """A server's view of the others."""

    blocks: int
    """Of the model."""
    servers: Mapping[str, ServerRecord]
    """The other servers: those that plan to serve count as if they did."""
    step: int = 1
    """Blocks that share parameters stay together: windows begin and end at multiples."""


def block_rates(view: PlacementView) -> list[float]:
    """Return the rate at which each block is served, in tokens a millisecond: the sum of its servers'."""
    rates = [0.0] * view.blocks
    for record in view.servers.values():
        if record.leaving:
            continue
        count = record.end - record.first
        rate = 1.0 / (record.step_ms if record.step_ms > 0 else BLOCK_MS * count)
        for block in range(record.first, min(record.end, view.blocks)):
            rates[block] += rate
    return rates


def choose_blocks(view: PlacementView, room: int, chance: Callable[[], float]) -> Span:
    """Return the blocks for a server with room for `room` of them. `chance` gives numbers in [0, 1) and decides between
    equals."""
    count = max(view.step, min(room, view.blocks) // view.step * view.step)
    if count >= view.blocks:
        return Span.whole(view.blocks)
    rates = block_rates(view)
    borders = {border for record in view.servers.values() for border in (record.first, record.end)}
    starts = sorted({*range(0, view.blocks - count + 1, view.step), view.blocks - count})

    def worth(first: int) -> tuple[list[float], int, float]:
        end = first + count
        meets = (first in borders or first == 0) + (end in borders or end == view.blocks)
        return sorted(rates[first:end]), -meets, chance()

    first = min(starts, key=worth)
    return Span(first, first + count, view.blocks)


def better_blocks(
    view: PlacementView, mine: ServerRecord, room: int, now: float, chance: Callable[[], float]
) -> Span | None:
    """Return the blocks to move to, or None to stay. `view` is without this server."""
    if mine.pinned or mine.leaving or now - mine.since < STAY_S or not mine.serves(now):
        return None
    if any(record.ready_at > now for record in view.servers.values()):
        return None  # one moves at a time
    span = choose_blocks(view, room, chance)
    if (span.first, span.end) == (mine.first, mine.end):
        return None
    left = [block for block in range(mine.first, min(mine.end, view.blocks)) if block not in span.blocks]
    rates, own = block_rates(view), 1.0 / (mine.step_ms if mine.step_ms > 0 else BLOCK_MS * (mine.end - mine.first))
    stayed, moved = _with(rates, range(mine.first, mine.end), own), _with(rates, span.blocks, own)
    if uncovered(moved) != uncovered(stayed):
        return span if uncovered(moved) < uncovered(stayed) and chance() < URGENT_SHARE else None
    if min(_counts(view, left), default=SPARES_MIN) < SPARES_MIN:
        return None  # if another one leaves them at the same time, they have no server
    return span if min(moved) > GAIN_MIN * min(stayed) and chance() < MOVE_SHARE else None


def _counts(view: PlacementView, blocks: Iterable[int]) -> list[int]:
    """Return how many servers each of these blocks has."""
    records = [record for record in view.servers.values() if not record.leaving]
    return [sum(record.first <= block < record.end for record in records) for block in blocks]


def uncovered(rates: Iterable[float]) -> int:
    """Return how many blocks have no server."""
    return sum(rate <= 0 for rate in rates)


def _with(rates: Iterable[float], blocks: Iterable[int], own: float) -> list[float]:
    added = frozenset(blocks)
    return [rate + own * (block in added) for block, rate in enumerate(rates)]
