"""Choice of the server to replace in a route, by the messages that it sent, or failed to send, during one answer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Final

from peer.errors import NetworkError
from swarm.inference.client_view import ServersView
from swarm.inference.conduct import TokenPace
from swarm.inference.messages import NeighbourLost, SessionRefused
from swarm.inference.route import Route

STALL_S: Final = 20.0
"""After this long without a token, servers resend what the next one lacks; after twice as long, it is an error."""
REPLACED_S: Final = 5.0
"""After this long without a token, a dispensable server is replaced; the next time, after twice as long."""
FORETOLD_TIMES: Final = 4.0
"""A chain of many or distant servers has this many times their foretold time of a token, if that is longer."""
TOKEN_S: Final = 0.02
"""Each token that is to be computed lengthens these by this much."""
REFUSALS_MAX: Final = 3
"""A server with this many refusals in one answer is at fault, or the one before it."""
FRUITLESS_MAX: Final = 12
"""So many routes in a row that give no token end an answer."""
PAUSE_S, PAUSE_MAX_S = 0.25, 2.0
"""Before the third route in a row, and at most."""
LATE_GAIN: Final = 3.0
"""Another server of late tokens' blocks must have been this many times less late."""
_OF_WHAT_CAME: Final = ("shape", "value", "not_finite", "gap")


class RouteJudge:
    """Notes in what the client knows of the servers who has failed, and who has misbehaved. Each method returns the
    server to drop from the route, None if all stay."""

    def __init__(self, servers: ServersView, route_without: Callable[[str], Route | None]) -> None:
        """`route_without`: a route that has not that server, if there is one."""
        self._servers, self._route_without = servers, route_without
        self._refusals = Counter[str]()
        self.gaps = self.stalls = self._tries = self._fruitless = 0
        """Since the last token, as all of these: positions that were missing, and waits that were too long; routes that
        were tried, and that were wired."""

    def token_came(self) -> None:
        """Note that the route gives tokens."""
        self.gaps = self.stalls = self._tries = self._fruitless = 0

    def pause_s(self) -> float:
        """Return how long to wait before the next route is tried: the first two are at once."""
        self._tries += 1
        return 0.0 if self._tries <= 2 else min(PAUSE_S * 2.0 ** (self._tries - 3), PAUSE_MAX_S)

    def patience_s(self, route: Route, tokens: int) -> float:
        """Return how long to wait for the next token of a route that must compute this many first."""
        usual_s = max(REPLACED_S, FORETOLD_TIMES * self._servers.foretold_ms(route) / 1000)
        return min(usual_s * 2.0**self.stalls, STALL_S) + TOKEN_S * tokens

    def check_fruitless(self, refusal: str) -> None:
        """Note that a route is to be wired. Raises NetworkError after many that gave no token. `refusal`: the last
        one."""
        self._fruitless += 1
        if self._fruitless > FRUITLESS_MAX:
            raise NetworkError(f"no chain of servers gives a token ({refusal or 'no reason given'}): try again later")

    def begin(self) -> None:
        """Note that an answer begins."""
        self._refusals.clear()

    def failed(self, peer: str, full: bool = False) -> str:
        """A server is gone, or says that it takes no session."""
        self._servers.conduct.failed(peer, full)
        return peer

    def misbehaved(self, peer: str) -> str:
        """A server did what no good one does."""
        self._servers.conduct.misbehaved(peer)
        return peer

    def refused(self, route: Route, place: int, message: SessionRefused, prefix: str) -> str | None:
        """A server, seen at an address prefix, refuses to continue."""
        peer, cause = route[place].peer, message.cause
        self._refusals[peer] += 1
        too_often = self._refusals[peer] >= REFUSALS_MAX
        if cause == "gap" and not too_often:
            self.gaps += 1
            return None
        if cause in _OF_WHAT_CAME:  # so it says
            if place == 0:
                return self.misbehaved(peer)  # the client sends nothing wrong
            return self._either((peer, prefix), route[place - 1].peer, usual=peer, is_gone=False)
        if too_often:
            return self.misbehaved(peer)
        if cause == "commit":
            self._servers.outdated()
            return None
        return self.failed(peer, full=cause == "full")

    def lost(self, route: Route, place: int, message: NeighbourLost, prefix: str) -> str | None:
        """A server, which is seen at an address prefix, says that it cannot reach the next one."""
        peer, target = route[place].peer, route[(place + 1) % len(route)].peer
        if message.peer != target:
            return self.misbehaved(peer)
        return self._either((peer, prefix), target, usual=target, is_gone=True) or self.failed(target)

    def silent(self, route: Route) -> str | None:
        """No token has come for long."""
        self.stalls += 1
        peer = self._least_proven(route)
        return None if peer is None else self.misbehaved(peer)

    def late(self, route: Route, pace: TokenPace) -> str | None:
        """Tokens may come far later than foretold: then what was measured makes the next route another one."""
        if not self._servers.is_late(route, pace):
            return None
        self._servers.computed(route, pace)
        peer = self._least_proven(route)
        other = None if peer is None else self._route_without(peer)
        if peer is None or other is None:
            return None
        penalty_ms, here = self._servers.conduct.penalty_ms, {hop.peer for hop in route}
        known_ms = max((penalty_ms(hop.peer) for hop in other if hop.peer not in here), default=0.0)
        return None if LATE_GAIN * known_ms > penalty_ms(peer) else peer  # all may be slow today

    def _least_proven(self, route: Route) -> str | None:
        """Return the server that has computed least for this client, of equals the last one, of those that can be done
        without."""
        proven = {hop.peer: (self._servers.proven[hop.peer], -place) for place, hop in enumerate(route)}
        return next((peer for peer in sorted(proven, key=proven.__getitem__) if self._route_without(peer)), None)

    def _either(self, accuser: tuple[str, str], accused: str, usual: str, is_gone: bool) -> str | None:
        """One of two servers is at fault, the first of which (id, prefix) complains of the other: it may lie. `usual`:
        the one to do without if nothing else is known."""
        conduct = self._servers.conduct
        for peer in conduct.suspects(*accuser, accused, usual):
            if self._route_without(peer):
                if peer == accused:
                    conduct.clear(accused)
                return self.failed(peer) if is_gone else self.misbehaved(peer)
        return None
