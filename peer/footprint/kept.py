"""How many copies of what a peer keeps. The stores that keep them read their limits here, and so do the sums."""

from __future__ import annotations

from typing import Final

SNAPSHOTS: Final = 2
"""States before the last one that stay while joiners read them."""
SMALL_BYTES: Final = 16 << 20
"""Of a small state, more snapshots and results are kept while each kind together is no larger than this: its rounds may
be over in less time than a joiner takes to ask for a state."""
SNAPSHOTS_MAX: Final = 64
RESULTS: Final = 4
"""Rounds whose merged results are kept at least, for peers that missed only these."""
RESULTS_SHARE: Final = 0.5
"""More of them are kept while together they are no larger than this share of the state."""
RESULTS_MAX: Final = 64
AUDITED: Final = 4
"""Commits whose exchanges stay, with all that this peer sent and received, so that their slices can be audited: small
ones in memory, others in a file."""
CHECKPOINTS: Final = 2
"""On disk."""
CHECKPOINT_S: Final = 10.0
"""Checkpoints are begun no more often."""
INNER_STATE_S: Final = 300.0
"""Nor is the state of the inner optimizer written, where it is large: 8 bytes a parameter of AdamW, which a billion
parameters make 8 GB, or 2.3 TB a day. A lost worker loses a small part of what moments remember in training."""


def snapshots(state_bytes: float) -> int:
    """Return how many states of that size are kept for joiners beside the last one, in the end."""
    return max(SNAPSHOTS, min(SNAPSHOTS_MAX, int(SMALL_BYTES // max(1.0, state_bytes))) - 1)


def snapshots_lie_in_files(state_bytes: float) -> bool:
    """Return whether states of that size that are kept for joiners lie in files, where the others are in memory."""
    return (SNAPSHOTS + 1) * state_bytes > SMALL_BYTES


def results(state_bytes: float, result_bytes: float) -> int:
    """Return how many results of that size are kept in the end."""
    room = max(RESULTS_SHARE * state_bytes, SMALL_BYTES)
    return max(RESULTS, min(RESULTS_MAX, int(room // max(1.0, result_bytes))))


def result_lies_in_a_file(result_bytes: float) -> bool:
    """Return whether a kept result of that size is read from its file; each one that is takes a descriptor."""
    return RESULTS_MAX * result_bytes > SMALL_BYTES


def lies_in_a_file(exchange_bytes: float) -> bool:
    """Return whether a kept exchange lies in a file. `exchange_bytes`: the slices that this peer sent and received."""
    return (AUDITED + 1) * exchange_bytes > SMALL_BYTES
