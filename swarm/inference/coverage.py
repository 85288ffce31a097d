"""The servers of each block, and the fault where a block has no server that takes sessions. Pure."""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from itertools import groupby
from typing import Final, Literal

from swarm.inference.record import ServerRecord
from swarm.inference.route import RouteView

BlockState = Literal["held", "full", "silent", "arriving", "leaving", "unserved"]
"""The best that any server of a block is."""
_BEST_FIRST: Final[tuple[BlockState, ...]] = ("held", "full", "silent", "arriving", "leaving", "unserved")


def server_state(record: ServerRecord, now: float, full: bool = False, silent: bool = False) -> BlockState:
    """Return a server's state for new sessions. `full`: it has refused one for lack of room; `silent`: it has recently
    failed this client."""
    if record.leaving:
        return "leaving"
    if not record.serves(now):
        return "arriving"
    if full or (record.pages and not record.pages_free):
        return "full"
    return "silent" if silent else "held"


def block_states(view: RouteView, full: Container[str] = (), silent: Container[str] = ()) -> list[BlockState]:
    """Return the state of each block of the model. `full`, `silent`: servers, as in `server_state`."""
    best = [len(_BEST_FIRST) - 1] * view.blocks
    for peer, record in view.servers.items():
        place = _BEST_FIRST.index(server_state(record, view.now, peer in full, peer in silent))
        for block in range(record.first, min(record.end, view.blocks)):
            best[block] = min(best[block], place)
    return [_BEST_FIRST[place] for place in best]


def troubles(states: Sequence[BlockState]) -> list[str]:
    """Return a sentence for each stretch of blocks that has no server for a new session, from the first block on."""
    return [
        _SENTENCES[state].format(blocks_text(first, end)) for first, end, state in stretches(states) if state != "held"
    ]


def stretches(states: Iterable[BlockState]) -> list[tuple[int, int, BlockState]]:
    """Return the stretches of blocks of the same state: first, end, state."""
    found, first = list[tuple[int, int, BlockState]](), 0
    for state, blocks in groupby(states):
        end = first + sum(1 for _ in blocks)
        found.append((first, end, state))
        first = end
    return found


def blocks_text(first: int, end: int) -> str:
    """Return "block 7" or "blocks 3 to 5"."""
    return f"block {first}" if end == first + 1 else f"blocks {first} to {end - 1}"


_SENTENCES: Final[dict[BlockState, str]] = {
    "full": "all that hold {} are full",
    "silent": "none that holds {} answers",
    "arriving": "those that are to hold {} are not ready yet",
    "leaving": "all that hold {} are about to leave",
    "unserved": "no server holds {}",
}
