"""A client's view of the servers: their records, the measured ways to them, and those that have failed it."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import trio

from dht.node import Node
from peer.catalogue.groups import MembershipStale
from peer.config import HiddenType
from peer.errors import BarnraiseError, NetworkError
from peer.ipc.sampling_options import SETTINGS_OF
from peer.net.host import Host
from swarm.inference.conduct import Avoids, ServerConduct, TokenPace
from swarm.inference.coverage import block_states, troubles
from swarm.inference.record import SERVERS, ServedCommit, ServerRecord, SessionNeeds, servers_key
from swarm.inference.route import Hop, Route, RouteView, find_route, foretold_ms, uncovered
from swarm.membership.membership import read_records

NONE: Final = SessionNeeds()
FRESH_S: Final = 10.0
TOLD_S: Final = 1.5
"""So long a session looks for a server of blocks that none has before it says so."""


@dataclass(frozen=True)
class Patience:
    """How long the sessions of a client wait for servers that are missing."""

    wait_s: float = TOLD_S
    """Then the answer fails, and may continue later."""
    tell: Callable[[str], None] = lambda missing: None
    """Called with what is missing, once each time."""
    comes_back: Callable[[], bool] = lambda: False
    """Whether a server that is missing is known to come back: it is waited for as long as that is so."""


class NoServers(NetworkError):
    """Some block of the model has no server now. The session is unchanged, and can continue later."""


class ServersView:
    """The servers of one served model, as one client sees them."""

    def __init__(self, host: Host, node: Node, run_id: str, blocks: int, patience: Patience | None = None) -> None:
        self.records: Mapping[str, ServerRecord] = {}
        self.blocks = blocks
        self.conduct = ServerConduct()
        self.proven = Counter[str]()
        """Tokens that a server has helped to compute."""
        self._host, self._node, self._key = host, node, servers_key(run_id)
        self._chance = random.Random().random
        self._way_ms: dict[str, float] = {}
        self._read_at = float("-inf")
        self._reading = trio.Lock()
        self._patience, self._told = patience or Patience(), float("-inf")

    async def refresh(self, age_s: float = FRESH_S) -> None:
        """Read the records, unless they were read less than `age_s` ago. Unreadable records stay as they are."""
        async with self._reading:
            if trio.current_time() - self._read_at < age_s:
                return
            try:
                self.records = await read_records(self._node, self._host, SERVERS, self._key)
                self._read_at = trio.current_time()
            except BarnraiseError as error:
                self._host.events.emit(MembershipStale(reason=str(error)))

    def measured(self, peer: str, rtt_s: float) -> None:
        """Note the round trip to a server."""
        if rtt_s > 0:
            self._way_ms[peer] = 500.0 * rtt_s

    def foretold_ms(self, route: Route) -> float:
        """Return what a token takes on a route by what its servers say, and the ways to them."""
        return foretold_ms(self.view(), route)

    def is_late(self, route: Route, pace: TokenPace) -> bool:
        """Whether a route is far slower than its servers foretold."""
        return pace.is_late(self.foretold_ms(route))

    def computed(self, route: Route, pace: TokenPace) -> None:
        """Note that the servers of a route gave tokens of an answer, and how much later than foretold."""
        peers = [hop.peer for hop in route]
        known = {peer: count for peer, count in self.proven.items() if peer in self.records}  # others have left
        self.proven = Counter(known) + Counter(dict.fromkeys(peers, pace.tokens))
        excess_ms = pace.excess_ms(self.foretold_ms(route))
        if excess_ms is not None:
            self.conduct.measured(peers, excess_ms)

    def commits(self) -> list[ServedCommit]:
        """Return the commits of a training run that some server serves now, newest first."""
        now = time.time()
        return sorted({c for r in self.records.values() if r.serves(now) for c in r.commits}, reverse=True)

    def outdated(self) -> None:
        """Note that a server serves something else than its record says: the records are read again."""
        self._read_at = float("-inf")

    def plan_newest(
        self, avoids: Avoids = "all", needs: SessionNeeds = NONE
    ) -> tuple[Route | None, ServedCommit | None]:
        """Return a route of one commit, the newest that has one; of a served model, which has none, any route."""
        choices: Sequence[ServedCommit | None] = self.commits() or (None,)
        for commit in choices:
            route = self.plan((), avoids, commit, needs)
            if route is not None:
                return route, commit
        return None, None

    def plan(
        self,
        kept: Route,
        avoids: Avoids = "all",
        commit: ServedCommit | None = None,
        needs: SessionNeeds = NONE,
        also: Iterable[str] = (),
    ) -> Route | None:
        """Return a route that keeps these hops and fills the gaps, or None. `avoids`: the servers to avoid, beside
        `also`. `commit`: the one that all servers have. `needs`: what they must know."""
        view = self._view({peer: record for peer, record in self._taking(needs).items() if record.has(commit)})
        without = {*also, *self.conduct.without(avoids), *(hop.peer for hop in kept)}
        route, at = list[Hop](), 0
        for first, end, hop in [*((hop.first, hop.end, hop) for hop in kept), (view.blocks, view.blocks, None)]:
            if at < first:
                filled = find_route(view, self._chance, first=at, end=first, without=without)
                if filled is None:
                    return None
                route += filled
            if hop is not None:
                route.append(hop)
            at = end
        return tuple(route)

    @property
    def dtype(self) -> HiddenType:
        """The type in which the servers compute."""
        return next((record.dtype for record in self.records.values()), "fp32")

    def uplink_bytes_s(self, route: Route) -> float:
        """Return the slowest measured uplink between the servers of a route; 0 if none has been the limit."""
        records = [self.records[hop.peer] for hop in route[:-1] if hop.peer in self.records]
        return min((record.uplink_bytes_s for record in records if record.uplink_bytes_s), default=0.0)

    def _taking(self, needs: SessionNeeds) -> dict[str, ServerRecord]:
        """Return the records of the servers that know what a session needs."""
        return {peer: record for peer, record in self.records.items() if record.takes(needs, self.blocks)}

    def _knows(self, option: str) -> bool:
        """Whether there is a route whose last server knows an option of sampling."""
        return not uncovered(self._view(self._taking(SessionNeeds(options=(option,)))))

    def missing(self, refusal: str, needs: SessionNeeds = NONE) -> str:
        """Say what is missing for a route, and what to do. `refusal`: the last one of a server."""
        if not uncovered(self.view()):
            if uncovered(self._view(self._taking(SessionNeeds(needs.wire)))):
                return f"some blocks have no server that takes {needs.wire} hidden states: ask without a wire type"
            if uncovered(self._view(self._taking(needs))):
                named = [SETTINGS_OF[option] for option in needs.options if not self._knows(option)]
                return (
                    f"no server of the last block knows {' and '.join(named) or 'all that is asked for'}: ask without"
                    " that, or have its operator install a newer version"
                )
        wrong = troubles(block_states(self.view(), *self.conduct.states()))
        what = "; ".join(wrong) or "no chain of servers takes this session"
        why = f" ({refusal})" if refusal else ""
        return f"{what}{why}: start another server with `peer serve INVITE`, or try again later"

    def check_wait(self, began: float, refusal: str, needs: SessionNeeds) -> None:
        """Tell once what a session that began to look for servers then waits for; raise NoServers when it has waited
        for long enough."""
        waited_s = trio.current_time() - began
        if waited_s <= TOLD_S:
            return
        missing = self.missing(refusal, needs)
        if waited_s > self._patience.wait_s and not self._patience.comes_back():
            raise NoServers(missing)
        if self._told < began:
            self._told = trio.current_time()
            self._patience.tell(missing)

    def view(self) -> RouteView:
        """Return what routes are planned with."""
        return self._view(self.records)

    def _view(self, records: Mapping[str, ServerRecord]) -> RouteView:
        return RouteView(self.blocks, records, time.time(), self._way_ms.get, self.conduct.penalty_ms)
