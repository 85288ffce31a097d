"""A client's session: one text that grows, computed by a chain of servers, any of which can be replaced.

The client has the tokens, so it can have everything computed again. Mostly it need not: a server that is replaced gets
what the server before it had sent, and the others go on where they are. The same tokens come out, because the noise of
sampling depends on seed and position alone.
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import ExitStack
from typing import Final

import trio

from peer.errors import BarnraiseError, ConfigError, ConnectionLost, NetworkError
from peer.ipc.block_messages import WireType
from peer.ipc.sampling_options import Sampling
from peer.net.flow.flow import Flow
from swarm.inference.client_view import TOLD_S, ServersView
from swarm.inference.drawn_token import DrawnToken
from swarm.inference.messages import (
    IDS_MAX,
    Allow,
    EndSession,
    NeighbourLost,
    PassTokens,
    Replay,
    Rewind,
    ServingMessage,
    SessionRefused,
    SessionStarted,
    StartSession,
    TokenDrawn,
)
from swarm.inference.page_names import page_names
from swarm.inference.record import ServedCommit
from swarm.inference.resume import blamed, resume
from swarm.inference.route import Hop, Route
from swarm.inference.server_flows import ServerFlows

AHEAD_TOKENS: Final = 32
"""So many tokens are drawn before the client has taken the first of them."""
START_S: Final = 8.0
"""For the answer of a server to a revision."""
STALL_S: Final = 20.0
"""Without a token for so long, the servers send again what the next one lacks; after as long again, it is an error."""
_RETRY_S: Final = 0.25
_WAIT_RETRY_S: Final = 2.0
_COMMIT_AGE_S: Final = 1.0


class RemoteSession:
    """One session. `tokens` holds all its tokens, drawn ones included."""

    def __init__(
        self,
        server_flows: ServerFlows,
        servers: ServersView,
        sampling: Sampling,
        *,
        stops: Sequence[int],
        context: int,
        wire: WireType | None = None,
    ) -> None:
        """`context`: the longest text in tokens. `wire`: the type of hidden states; None: the model's own."""
        self.id = secrets.token_bytes(16)
        self.tokens: list[int] = []
        self.route: Route = ()
        self.commit: ServedCommit | None = None
        """Of a training run: the commit with which the last answer was computed."""
        self.failovers = 0
        """How often a server had to be replaced."""
        self._server_flows, self._servers = server_flows, servers
        self._sampling, self._stops, self._context, self._wire_type = sampling, tuple(stops), context, wire
        self._revision, self._wired = 0, False
        self._silent = set[str]()
        """Servers that have not answered the last revision."""
        self._flows: dict[str, Flow] = {}
        self._held = ExitStack()
        self._inbox: deque[tuple[Flow, ServingMessage]] = deque()
        self._came = trio.Event()
        self._allowed = 0
        self._given = 0
        """The position behind the last prompt."""
        self._ahead = self._stalled = False
        """Whether the servers may have drawn more than was taken; whether no token has come for `STALL_S`."""
        self._gaps, self._refusal = 0, ""
        server_flows.add(self)

    # -- what comes ----------------------------------------------------------------------------------------------------

    def take(self, flow: Flow, message: ServingMessage) -> None:
        """Take a message of a server."""
        self._inbox.append((flow, message))
        self._came.set()

    def flow_ended(self, flow: Flow) -> None:
        """Take note that a flow has ended."""
        if flow in self._flows.values():
            self._came.set()

    # -- generating ----------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Sequence[int], count: int) -> AsyncGenerator[DrawnToken, None]:
        """Append `prompt` to the session and yield up to `count` tokens that follow; ends early behind a stop token,
        which is yielded, too. An empty prompt goes on where an error ended the last answer.

        Raises ConfigError for a text that is too long, NoServers, NetworkError."""
        if not prompt and not self.tokens:
            raise ConfigError("the prompt is empty: give at least one token")
        end = len(self.tokens) + len(prompt) + count
        if end > self._context:
            raise ConfigError(
                f"prompt and answer have {end} tokens and the model's context {self._context}: shorten the prompt, or"
                " ask for fewer tokens"
            )
        self._server_flows.add(self)
        if self._ahead:
            self._begin_again()
        first = max(0, len(self.tokens) - 1)  # the last drawn token was not sent on
        self.tokens += prompt
        self._given, self._allowed, self._ahead, self._stalled = len(self.tokens), 0, True, False
        if self._wired:
            self._feed(first)
        while len(self.tokens) < end:
            drawn = await self._next(end)
            self._ahead = len(self.tokens) < end and drawn.token not in self._stops
            yield drawn
            if not self._ahead:
                return

    def _begin_again(self) -> None:
        """Go on as a new session: the servers of this one have drawn tokens that the caller did not want."""
        self._server_flows.remove(self)
        self.close()
        self.id = secrets.token_bytes(16)
        self.route, self._revision = (), 0
        self._inbox.clear()
        self._server_flows.add(self)

    async def _next(self, end: int) -> DrawnToken:
        """Return the next token, replacing servers until it comes."""
        stalled_at = trio.current_time() + STALL_S
        while True:
            if not self._wired:
                await self._wire(end)
                stalled_at = trio.current_time() + STALL_S
            self._allow(end)
            while self._inbox:
                flow, message = self._inbox.popleft()
                drawn = self._handle(flow, message)
                if drawn is not None:
                    self._gaps, self._stalled = 0, False
                    return drawn
            if not self._wired or self._lost_hops():  # a refusal is no message to wait for another one after
                self._wired = False
                continue
            self._came = trio.Event()
            with trio.move_on_at(stalled_at) as timeout:
                await self._came.wait()
            if timeout.cancelled_caught:
                if self._stalled:
                    raise NetworkError(f"no token came for {2 * STALL_S:.0f} s from {self.route[-1].peer}: try again")
                self._stalled, self._wired = True, False

    def _handle(self, flow: Flow, message: ServingMessage) -> DrawnToken | None:
        """Act on one message while the session is wired."""
        if isinstance(message, TokenDrawn):
            return self._take_token(message)
        if isinstance(message, NeighbourLost) and message.revision == self._revision:
            self._fail(message.peer)
        elif isinstance(message, SessionRefused) and message.revision == self._revision:
            if message.cause == "gap":
                self._gaps += 1
            elif message.cause == "commit":
                self._servers.outdated()
                self._refusal, self.route = message.reason, ()
            else:
                self._refusal = message.reason
                to_blame = blamed(self.route, flow.peer, message.cause)
                if to_blame is None:
                    raise ConfigError(f"a server refuses this text: {message.reason}")
                self._fail(to_blame, full=message.cause == "full")
            self._wired = False
        return None

    def _take_token(self, message: TokenDrawn) -> DrawnToken | None:
        if message.position != len(self.tokens):
            return None  # drawn twice, as after a replacement
        self.tokens.append(message.token)
        if message.revision < self._revision and self._wired:
            self._feed(message.position)  # it was sent to a server that is gone
        return DrawnToken(message.position, message.token, message.logprob, message.likeliest)

    def _allow(self, end: int) -> None:
        """Let the last server draw on."""
        allowed = min(end, len(self.tokens) + AHEAD_TOKENS)
        if self._wired and (allowed == end > self._allowed or allowed >= self._allowed + AHEAD_TOKENS // 2):
            self._allowed = allowed
            self._say(self.route[-1].peer, Allow(self.id, allowed, self._given))

    def _feed(self, position: int) -> None:
        """Send the tokens from a position on to the first server; the last of them is to be followed by a new one."""
        ids = self.tokens
        for start in range(position, len(ids), IDS_MAX):
            part = tuple(ids[start : start + IDS_MAX])
            draws = start + len(part) == len(ids)
            self._say(self.route[0].peer, PassTokens(self.id, start, part, draws))

    def _say(self, peer: str, message: ServingMessage) -> None:
        try:
            self._flows[peer].send(message)
        except ConnectionLost:
            self._came.set()

    def _fail(self, peer: str, full: bool = False) -> None:
        self._servers.failed(peer, full)
        self._wired = False
        if (flow := self._flows.pop(peer, None)) is not None:
            self._send_end(flow)  # what it holds of the session is of no use any more

    def _lost_hops(self) -> list[Hop]:
        return [hop for hop in self.route if hop.peer not in self._flows or not self._flows[hop.peer].is_open]

    # -- the route -----------------------------------------------------------------------------------------------------

    async def _wire(self, end: int) -> None:
        """Find servers for all blocks and have them compute. Raises NoServers."""
        began = trio.current_time()
        while True:
            if self._servers.commits():  # a run goes on
                await self._servers.refresh(_COMMIT_AGE_S)
            lost = self._lost_hops()
            for hop in lost:
                self._servers.failed(hop.peer)
            kept = tuple(hop for hop in self.route if hop not in lost)
            route, answer_s = self._plan(kept), START_S
            if route is None:
                await self._servers.refresh(_RETRY_S if trio.current_time() - began < TOLD_S else _WAIT_RETRY_S)
                route = self._plan(kept) or self._plan(())
            if route is None:  # those that have failed lately are better than none
                route, answer_s = self._plan((), avoids=False), TOLD_S
            if route is not None and await self._try(route, end, answer_s):
                return
            if route is None or answer_s < START_S:
                self._servers.check_wait(began, self._refusal, self._wire_type)
            await trio.sleep(_RETRY_S if route is None or answer_s < START_S else 0)

    def _plan(self, kept: Route, avoids: bool = True) -> Route | None:
        """Return a route. An answer keeps the commit with which it began."""
        if kept or len(self.tokens) > self._given:
            return self._servers.plan(kept, avoids, self.commit, self._wire_type)
        route, commit = self._servers.plan_newest(avoids, self._wire_type)
        if route is not None and commit != self.commit:
            if self._revision:
                self._begin_again()
            self.commit = commit
        return route

    async def _try(self, route: Route, end: int, answer_s: float) -> bool:
        """Wire a route and feed it. Return False if one of its servers fails."""
        fresh = [hop for hop in route if hop not in self.route or hop in self._lost_hops()]
        if self.route and self._revision and fresh:
            self.failovers += 1
        self._revision += 1
        old, self.route = self.route, route
        self._release(old)
        with trio.move_on_after(answer_s) as timeout:
            haves = await self._start_all(route, set(fresh), end)
        if timeout.cancelled_caught:
            haves = None
            for hop in self._silent:
                self._fail(hop)
        if haves is None:
            return False
        self._wired, self._allowed = True, 0
        self._go_on(haves, {hop.peer for hop in fresh} | ({route[-1].peer} if self._stalled else set()))
        return True

    def _release(self, old: Route) -> None:
        """End the session at servers that are no longer part of the route."""
        here = {hop.peer for hop in self.route}
        for peer in {hop.peer for hop in old} - here:
            flow = self._flows.pop(peer, None)
            if flow is not None:
                self._send_end(flow)

    async def _start_all(self, route: Route, fresh: set[Hop], end: int) -> list[int] | None:
        """Wire the session at all servers at once. Return the positions that each has, or None if one fails."""
        failed = list[str]()
        self._silent = {hop.peer for hop in route}

        async def open_flow(peer: str) -> None:
            try:
                self._flows[peer] = await self._server_flows.open(peer)
            except BarnraiseError:
                failed.append(peer)

        async with trio.open_nursery() as nursery:
            for hop in route:
                if hop.peer not in self._flows or not self._flows[hop.peer].is_open:
                    nursery.start_soon(open_flow, hop.peer)
        if not failed:
            self._hold()
            for index, hop in enumerate(route):
                self._say(hop.peer, self._start_message(route, index, end, fresh))
            return await self._answers(route)
        for peer in failed:
            self._fail(peer)
        return None

    def _start_message(self, route: Route, index: int, end: int, fresh: set[Hop]) -> StartSession:
        hop = route[index]
        alone = len(route) == 1
        names = page_names(self.tokens, self._wire_type) if self._revision == 1 or len(fresh) == len(route) else ()
        return StartSession(
            self.id,
            self._revision,
            hop.first,
            hop.end,
            source=route[index - 1].peer,
            target=route[0].peer if alone else route[(index + 1) % len(route)].peer,
            sampling=self._sampling,
            stops=self._stops,
            names=names,
            known=len(self.tokens),
            allowed=min(end, len(self.tokens) + AHEAD_TOKENS),
            commit=self.commit.name if self.commit is not None else b"",
            wire=self._wire_type,
        )

    async def _answers(self, route: Route) -> list[int] | None:
        """Wait for all servers. Tokens that come meanwhile are kept in order, also if one fails: those of a server that
        stays are drawn only once."""
        later = list[tuple[Flow, ServingMessage]]()
        try:
            return await self._collect(route, later)
        finally:
            self._inbox.extendleft(reversed(later))

    async def _collect(self, route: Route, later: list[tuple[Flow, ServingMessage]]) -> list[int] | None:
        haves = dict[str, int]()
        while True:
            while self._inbox:
                flow, message = self._inbox.popleft()
                if isinstance(message, SessionStarted):
                    if message.revision == self._revision:
                        haves[flow.peer] = message.have
                        self._silent.discard(flow.peer)
                elif isinstance(message, SessionRefused | NeighbourLost):
                    if message.revision == self._revision:
                        self._handle(flow, message)
                        return None
                else:
                    later.append((flow, message))
            if len(haves) == len(route):
                return [haves[hop.peer] for hop in route]
            if self._lost_hops():
                return None
            self._came = trio.Event()
            await self._came.wait()

    def _go_on(self, haves: list[int], fresh: set[str]) -> None:
        """Have each server send what the next one lacks, and send the first one what it lacks."""
        known, peers = len(self.tokens), [hop.peer for hop in self.route]
        then = resume(haves, known, [peer in fresh for peer in peers], self._gaps)
        for number, position in then.rewinds.items():
            self._say(peers[number], Rewind(self.id, position))
        for number, position in then.replays.items():
            self._say(peers[number], Replay(self.id, self._revision, position, known))
        if then.feed is not None:
            self._feed(then.feed)

    def _hold(self) -> None:
        """Watch whether the servers of the route are alive."""
        self._held.close()
        for hop in self.route:
            self._held.enter_context(self._flows[hop.peer].hold())
            self._servers.measured(hop.peer, self._flows[hop.peer].rtt_s)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session at all its servers. It may go on later: then all is computed again."""
        self._server_flows.remove(self)
        self._held.close()
        for flow in self._flows.values():
            if flow.is_open:
                self._send_end(flow)
        self._flows.clear()
        self._wired = False

    def _send_end(self, flow: Flow) -> None:
        try:
            flow.send(EndSession(self.id))
        except ConnectionLost:
            return
