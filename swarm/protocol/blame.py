"""Whom to leave out of the next attempt, after an exchange that ran out of time with nobody suspect."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping


def choose_excluded(waits: Mapping[str, tuple[Collection[str], Collection[str]]], turn: int) -> set[str]:
    """Who made an exchange run out of time. `waits`: for each peer, whose slices it still waited for as an owner, and
    which owners' results.

    Of two of whom one waited for the other, either may be at fault: it did not send, or it lies. (An owner that gave no
    results because it waited for slices itself is excused.) Whoever has most such quarrels goes first, until none is
    left; where several have as many, they take turns by `turn`."""
    accusations = {
        frozenset((peer, other))
        for peer, (missing, silent) in waits.items()
        for other in (*missing, *(owner for owner in silent if owner in waits and not waits[owner][0]))
        if other in waits and other != peer
    }
    blamed: set[str] = set()
    while accusations:
        counts = Counter(peer for pair in accusations for peer in pair)
        tied = sorted(peer for peer, count in counts.items() if count == max(counts.values()))
        worst = tied[turn % len(tied)]
        blamed.add(worst)
        accusations = {pair for pair in accusations if worst not in pair}
    return blamed
