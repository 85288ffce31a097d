"""Peers to leave out of the next attempt, after an exchange that timed out although no peer is suspected."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping


def choose_excluded(
    waits: Mapping[str, tuple[Collection[str], Collection[str]]], tie_breaker: int, me: str = ""
) -> set[str]:
    """Return the peers that probably made an exchange time out.

    `waits` maps each peer to the contributors whose slices it still lacked as an owner, and to the owners whose
    results it still lacked.

    If one peer waited for another, either may be at fault: the one did not send, or the other lies. An owner that
    sent no result because it lacked slices itself is excused. The peer in most of these accusations is excluded
    first, until no accusation is left; `tie_breaker` chooses among equals, but never `me`, the peer that chooses: of
    itself it knows that it does not lie, and it does not leave itself out."""
    accusations = {
        frozenset((peer, other))
        for peer, (missing, silent) in waits.items()
        for other in (*missing, *(owner for owner in silent if owner in waits and not waits[owner][0]))
        if other in waits and other != peer
    }
    excluded: set[str] = set()
    while accusations:
        counts = Counter(peer for pair in accusations for peer in pair)
        tied = sorted(peer for peer, count in counts.items() if count == max(counts.values()))
        tied = [peer for peer in tied if peer != me] or tied
        worst = tied[tie_breaker % len(tied)]
        excluded.add(worst)
        accusations = {pair for pair in accusations if worst not in pair}
    return excluded - {me}
