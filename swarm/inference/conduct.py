"""Conduct of servers towards one client: which ones it avoids, for how long, and how slow they truly were.

A server is believed about itself: that it is full, or about to leave. Its report about another one is a claim, and
either of the two may be at fault; so are their figures of speed. Only this client's own measurements count.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from typing import Final, Literal

import trio

from peer.net.backoff import Backoff

ABSENT_S: Final = 20.0
"""A server that is gone or full is not chosen for this long, unless no other has its blocks."""
BAD_S, BAD_MAX_S, BAD_FACTOR = 60.0, 3600.0, 4.0
"""A server that has misbehaved: first, longest and growth factor of its exclusion."""
CLAIMS_S: Final = 600.0
CLAIMS_MAX: Final = 1024
SLOW_S: Final = 120.0
"""So long counts how slow a server was."""
LATE_MS, LATE_TIMES = 1500.0, 10.0
"""A route is replaced within an answer if its tokens took this much, and this many times, longer than foretold."""
NOISE_MS: Final = 20.0
"""So much more than foretold is not held against a server."""

Avoids = Literal["all", "bad", "absent", "none"]
"""The servers that a route avoids: the bad ones, those that are gone or full, both, or none."""


class ServerConduct:
    """One client's memory of the servers of one model."""

    def __init__(self, clock: Callable[[], float] = trio.current_time) -> None:
        self._clock = clock
        self._absent = Backoff(ABSENT_S, ABSENT_S, factor=1.0, clock=clock)
        self._bad = Backoff(BAD_S, BAD_MAX_S, BAD_FACTOR, clock=clock)
        self._full = set[str]()
        self._claims: OrderedDict[tuple[str, str, str], float] = OrderedDict()
        """(accuser, its address prefix, accused) -> when, the oldest first."""
        self._excess: dict[str, tuple[float, float]] = {}  # ms a token, and when

    def failed(self, peer: str, full: bool = False) -> None:
        """Note that a server is gone, or says that it takes no session. `full`: for want of room."""
        self._absent.failed(peer)
        (self._full.add if full else self._full.discard)(peer)

    def misbehaved(self, peer: str) -> None:
        """Note that a server did what no good one does; each time it is done without for longer."""
        self._bad.failed(peer)

    def suspects(self, accuser: str, prefix: str, accused: str, usual: str) -> tuple[str, str]:
        """Note what one server, seen at an address `prefix`, says of another. Return both, first the one to do without:
        a prefix that accuses several is not believed, who is accused from several is at fault; else `usual`, which is
        one of the two. Prefixes count and not keys, which cost nothing."""
        now = self._clock()
        self._claims.pop((accuser, prefix, accused), None)
        self._claims[accuser, prefix, accused] = now
        while len(self._claims) > CLAIMS_MAX or next(iter(self._claims.values())) < now - CLAIMS_S:
            self._claims.popitem(last=False)
        says = len({other for _, place, other in self._claims if place == prefix})
        said = len({place for _, place, other in self._claims if other == accused})
        first = usual if says == said else accuser if says > said else accused
        return first, accused if first == accuser else accuser

    def clear(self, accused: str) -> None:
        """Hold nothing more against the servers that accused this one, which is at fault."""
        for claim in [claim for claim in self._claims if claim[2] == accused]:
            del self._claims[claim]
            self._bad.reset(claim[0])

    def without(self, avoids: Avoids) -> frozenset[str]:
        """Return the servers to do without."""
        found = set[str]()
        if avoids in ("all", "bad"):
            found |= self._bad.all_paused()
        if avoids in ("all", "absent"):
            found |= self._absent.all_paused()
        return frozenset(found)

    def states(self) -> tuple[frozenset[str], frozenset[str]]:
        """Return the servers that are full for this client, and those that are silent or bad for it."""
        without = self.without("all")
        full = without & self._full - self._bad.all_paused()
        return full, without - full

    def measured(self, peers: Iterable[str], excess_ms: float) -> None:
        """Note how much longer than foretold a token took that these servers computed together. The slow one
        shows when they work with others: each server's lowest recent value counts."""
        now = self._clock()
        if len(self._excess) > CLAIMS_MAX:
            self._excess = {peer: seen for peer, seen in self._excess.items() if now - seen[1] < SLOW_S}
        for peer in peers:
            before, at = self._excess.get(peer, (excess_ms, now))
            self._excess[peer] = (min(before, excess_ms) if now - at < SLOW_S else excess_ms), now

    def penalty_ms(self, peer: str) -> float:
        """Return what the client adds to a server's cost."""
        excess_ms, at = self._excess.get(peer, (0.0, 0.0))
        return excess_ms if excess_ms > NOISE_MS and self._clock() - at < SLOW_S else 0.0


class TokenPace:
    """When the tokens of one answer came, until its route changes."""

    COUNTED: Final = 16
    """Of one answer; they were allowed ahead, so none waited for the client."""

    def __init__(self, began: float, prompt: int) -> None:
        """`began`: when the servers had the last of `prompt` tokens to compute, at the latest."""
        self._at, self._prompt = [began], prompt

    @property
    def tokens(self) -> int:
        """How many tokens came, of those that are counted."""
        return len(self._at) - 1

    def came(self, at: float) -> None:
        """Note a token."""
        if len(self._at) <= self.COUNTED:
            self._at.append(at)

    def is_late(self, foretold_ms: float) -> bool:
        """Whether tokens come so much later than foretold that another route is worth its start."""
        took_ms = 1000 * (self._at[-1] - self._at[1]) if len(self._at) > 2 else 0.0
        usual_ms = (len(self._at) - 2) * max(foretold_ms, NOISE_MS)
        return took_ms > usual_ms + LATE_MS and took_ms > LATE_TIMES * usual_ms

    def excess_ms(self, foretold_ms: float) -> float | None:
        """Return how much longer a token took than foretold, the first one's share included; None before the second
        token. A prompt may take as long as that many tokens, one by one."""
        if len(self._at) < 3:  # the first token alone tells of the prompt
            return None
        took = sorted(later - sooner for sooner, later in zip(self._at[1:], self._at[2:], strict=False))
        usual = took[len(took) // 2]
        late = self._at[1] - self._at[0] - max(1, self._prompt) * max(usual, foretold_ms / 1000)
        return max(0.0, 1000 * usual - foretold_ms) + max(0.0, 1000 * late) / self.COUNTED
