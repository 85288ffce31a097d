"""Resuming a session after a revision: which server forgets, resends, or is fed, and from which position. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Final

from peer.config import TOKENS_MAX

GAPS_MAX: Final = 3
"""So many gaps in a row are filled by replays; then all is computed again."""


@dataclass(frozen=True)
class Resumption:
    """Instructions to the servers of a route, numbered in order."""

    rewinds: dict[int, int]
    """The position at and behind which a server forgets."""
    replays: dict[int, int]
    """The position from which a server sends its outputs again, to the next one; for each but the last."""
    feed: int | None
    """The position from which the client sends tokens to the first server; None: it has them all."""


class WiredServers:
    """The servers that a session was last wired to, each with the position from which it has kept its output: one that
    began with the pages of another session's prompt has computed, and so kept, only what follows them."""

    def __init__(self) -> None:
        self._kept_from: dict[str, int] = {}

    def wired(self, peers: Sequence[str], haves: Sequence[int], fresh: Collection[str]) -> int:
        """Take over a route that is wired, the positions that its servers have, and which of them are new to the
        session. Return how many servers of the last route it does without."""
        last, self._kept_from = self._kept_from, dict(zip(peers, haves, strict=True))
        for peer in last.keys() & self._kept_from.keys() - fresh:
            self._kept_from[peer] = min(last[peer], self._kept_from[peer])
        return len(last.keys() - self._kept_from.keys())

    def rewound(self, peer: str, position: int) -> None:
        """Note that a server computes, and keeps, everything from this position on."""
        self._kept_from[peer] = min(position, self._kept_from[peer])

    def lacks_output(self, peer: str) -> None:
        """Note that a server has not kept what it was to send again."""
        if peer in self._kept_from:
            self._kept_from[peer] = TOKENS_MAX

    def kept_from(self, peers: Sequence[str]) -> list[int]:
        """Return the position from which each of these servers has kept its output."""
        return [self._kept_from[peer] for peer in peers]

    def forget(self) -> None:
        """Note that the session begins again, at servers that are not compared with the last ones."""
        self._kept_from.clear()


def resume(
    haves: Sequence[int],
    known: int,
    fresh: Sequence[bool],
    gaps: int,
    row: int | None = None,
    kept_from: Sequence[int] = (),
) -> Resumption:
    """`haves`: the positions that each server has. `known`: those of the client. `row`: the first position whose output
    the client needs from the last server; None: the last one that it knows. `fresh`: which servers are new to the
    session, have lost their flow with the client, or have drawn no token for long. `gaps`: how many came in a row.
    `kept_from`: the position from which each server has kept its output; without them, all of it."""
    have, rewinds = list(haves), dict[int, int]()
    needed = known - 1 if row is None else row
    if all(fresh) or gaps >= GAPS_MAX:
        # Their prefixes may differ, and what one has computed before it was asked it has not kept to send.
        at = 0 if gaps >= GAPS_MAX else min(*have, needed)
        rewinds = {number: at for number, position in enumerate(have) if position > at}
        have = [at] * len(have)
    elif fresh[-1] and have[-1] > needed:
        rewinds[len(have) - 1] = have[-1] = needed  # what it sent may have been lost with its flow
    for number in reversed(range(min(len(kept_from), len(have) - 1))):
        if have[number + 1] < kept_from[number]:  # it computes again what it cannot send again
            rewinds[number] = have[number] = have[number + 1]
    replays = {number: have[number + 1] for number in range(len(have) - 1)}
    return Resumption(rewinds, replays, have[0] if have[0] < known else None)
