"""A client's session: one text that grows, computed by a chain of servers, any of which can be replaced.

The client has the tokens, so it can have everything computed again. That is rarely needed: a replacement server gets
the output of the server before it, and the others continue where they are. The same tokens come out, because the noise
of sampling depends on seed and position alone.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from typing import Final

import trio

from peer.config import ModelConfig
from peer.errors import NetworkError
from peer.ipc.sampling_options import Sampling
from peer.net.flow.flow import Flow
from peer.worker.grammar.client import AnswerGrammar
from swarm.inference.client_view import NONE, TOLD_S, ServersView
from swarm.inference.conduct import Avoids, TokenPace
from swarm.inference.drawing import Drawing
from swarm.inference.inbox import Arrival, Inbox
from swarm.inference.judge import STALL_S, TOKEN_S, RouteJudge
from swarm.inference.messages import (
    IDS_MAX,
    NeighbourLost,
    PassTokens,
    PromptLogprobs,
    Replay,
    Rewind,
    ServingMessage,
    SessionRefused,
    SessionStarted,
    StartSession,
    TokenDrawn,
)
from swarm.inference.page_names import page_names
from swarm.inference.record import ServedCommit, SessionNeeds
from swarm.inference.resume import WiredServers, resume
from swarm.inference.route import Route, placed
from swarm.inference.route_flows import RouteFlows
from swarm.inference.server_flows import ServerFlows
from swarm.inference.text_bounds import check_text

START_S: Final = 8.0
"""For the answer of a server to a revision."""
_RETRY_S: Final = 0.25
_WAIT_RETRY_S: Final = 2.0
_COMMIT_AGE_S: Final = 1.0
_BETTER_THAN_NONE: Final[tuple[tuple[Avoids, float], ...]] = (("bad", TOLD_S), ("absent", START_S), ("none", TOLD_S))


class RemoteSession:
    """One session. `tokens` holds all its tokens, drawn ones included."""

    def __init__(
        self,
        server_flows: ServerFlows,
        servers: ServersView,
        sampling: Sampling,
        *,
        stops: Sequence[int],
        model: ModelConfig,
        needs: SessionNeeds = NONE,
        grammar: AnswerGrammar | None = None,
    ) -> None:
        """`needs`: but for the options, which `sampling` has. `grammar`: of its one answer; None for none."""
        self.id = secrets.token_bytes(16)
        self.tokens: list[int] = []
        self.route: Route = ()
        self.commit: ServedCommit | None = None
        """Of a training run: the commit with which the last answer was computed."""
        self.failovers = 0
        """How many servers were replaced."""
        self._server_flows, self._servers, self._model = server_flows, servers, model
        self.drawing = Drawing(sampling, stops, model.vocab_size, grammar)
        self._needs = replace(needs, options=self.drawing.sampling.options)
        self._revision, self._wired = 0, False
        self._silent = set[str]()
        """Servers that have not answered the last revision."""
        self._flows, self._last = RouteFlows(server_flows), WiredServers()
        self._inbox, self._refusal = Inbox(), ""
        self._stalled = False
        """Whether no token has come for `STALL_S`."""
        self._judge = RouteJudge(servers, lambda peer: servers.plan((), "all", self.commit, self._needs, (peer,)))
        self._pace = TokenPace(0.0, 0)
        server_flows.add(self)

    # -- what comes ----------------------------------------------------------------------------------------------------

    def take(self, flow: Flow, message: ServingMessage) -> None:
        """Take a message of a server."""
        if not self._flows.has(flow):
            return  # it has been replaced
        if not self._inbox.put(flow, message):
            self._drop(self._judge.misbehaved(flow.peer))

    def flow_ended(self, flow: Flow) -> None:
        """Take note that a flow has ended."""
        if self._flows.has(flow):
            self._inbox.wake()

    # -- generating ----------------------------------------------------------------------------------------------------

    async def generate(self, prompt: Sequence[int], count: int) -> AsyncGenerator[TokenDrawn, None]:
        """Append `prompt` to the session and yield up to `count` tokens that follow, of 0 one, too; ends early after a
        stop token, which is yielded, too. An empty prompt continues where an error ended the last answer.

        Raises ConfigError for a text that is too long, NoServers, NetworkError."""
        check_text(self._model, len(self.tokens), prompt, count)
        end = len(self.tokens) + len(prompt) + max(1, count)
        self._server_flows.add(self)
        if not self.drawing.begin(len(self.tokens), len(prompt)) and self._revision:
            self._begin_again()
        first = max(0, len(self.tokens) - 1)  # the last drawn token was not sent on
        self.tokens += prompt
        self._stalled = False
        await self.drawing.follow(self.tokens)  # before a server is asked, as the schema may be refused
        self._judge.begin()
        self._pace = TokenPace(trio.current_time(), len(prompt))
        if self._wired:
            self._feed(first)
        try:
            while len(self.tokens) < end and not self.drawing.is_complete:
                drawn = await self._next(end)
                await self.drawing.follow(self.tokens)
                is_last = self.drawing.ends(drawn.token, len(self.tokens), end)
                if not is_last:
                    self._allow(end)
                yield drawn
                if is_last:
                    return
        finally:
            self._learn()

    def _learn(self) -> None:
        """Tell what this client knows of servers how long the tokens took that came by this route."""
        self._servers.computed(self.route, self._pace)
        self._pace = TokenPace(trio.current_time(), len(self.tokens))

    def _begin_again(self) -> None:
        """Go on as a new session: the servers of this one have drawn tokens that the caller did not want."""
        self._server_flows.remove(self)
        self.close()
        self.id = secrets.token_bytes(16)
        self.route, self._revision = (), 0
        self.drawing.forget()
        self._last.forget()
        self._inbox.clear()
        self._server_flows.add(self)

    async def _next(self, end: int) -> TokenDrawn:
        """Return the next token, replacing servers until it comes."""
        began, computed = trio.current_time(), len(self.tokens) if len(self.tokens) == self.drawing.given else 1
        stalls_at = began + self._judge.patience_s(self.route, computed)
        while True:
            if not self._wired:
                await self._wire(end)
                began, computed = trio.current_time(), len(self.tokens)
                stalls_at = began + self._judge.patience_s(self.route, computed)
            self._allow(end)
            for flow, message, at in self._inbox.take():
                drawn = self._handle(flow, message)
                if drawn is not None:
                    self._judge.token_came()
                    self._stalled = False
                    if not self.drawing.is_masked:  # else it waited for this client
                        self._pace.came(at)
                        self._drop(self._judge.late(self.route, self._pace))
                    return drawn
            if not self._wired or self._flows.lost(self.route):  # a refusal is no message to wait for another one after
                self._wired = False
                continue
            with trio.move_on_at(stalls_at) as timeout:
                await self._inbox.wait()
            if not timeout.cancelled_caught:
                continue
            self._drop(self._judge.silent(self.route))
            stalls_at = began + STALL_S + TOKEN_S * computed
            if self._wired and trio.current_time() >= stalls_at:
                if self._stalled:
                    raise NetworkError(f"no token came for {2 * STALL_S:.0f} s from {self.route[-1].peer}: try again")
                self._stalled, self._wired = True, False

    def _handle(self, flow: Flow, message: ServingMessage) -> TokenDrawn | None:
        """Act on one message of a server while the session is wired."""
        place = next((number for number, hop in enumerate(self.route) if hop.peer == flow.peer), None)
        if place is None:
            return None  # it has been replaced
        if isinstance(message, TokenDrawn):
            return self._take_token(place, message)
        if isinstance(message, PromptLogprobs):
            if place == len(self.route) - 1 and not self.drawing.scores.take(message):
                self._drop(self._judge.misbehaved(flow.peer))
                self._begin_again()  # it may have sent a token on that was not taken
            return None
        if isinstance(message, NeighbourLost | SessionRefused) and message.revision == self._revision:
            self._wired = False
            if isinstance(message, NeighbourLost):
                self._drop(self._judge.lost(self.route, place, message, flow.prefix))
            else:
                self._refusal = message.reason if message.cause != "gap" else self._refusal
                if message.cause == "gap":
                    self._last.lacks_output(flow.peer)
                self._drop(self._judge.refused(self.route, place, message, flow.prefix))
                if message.cause == "commit":
                    self.route = ()
        return None

    def _take_token(self, place: int, message: TokenDrawn) -> TokenDrawn | None:
        peer, is_last = self.route[place].peer, place == len(self.route) - 1
        if message.revision != self._revision and not is_last:
            return None  # it was the last one then
        if not is_last or not self.drawing.may_draw(message, len(self.tokens)):
            self._drop(self._judge.misbehaved(peer))
            if is_last and self.drawing.is_masked:
                self._begin_again()  # it has sent a forbidden token on
            return None
        if not self.drawing.is_next(message, len(self.tokens)):
            return None
        self.tokens.append(message.token)
        if message.revision < self._revision and self._wired:
            self._feed(message.position)  # it was sent to a server that is gone
        return message

    def _allow(self, end: int) -> None:
        """Let the last server draw on."""
        more = self.drawing.next(self.id, len(self.tokens), end) if self._wired else None
        if more is not None:
            self._say(self.route[-1].peer, *more)

    def _feed(self, position: int) -> None:
        """Send the tokens from a position on to the first server; the last of them is to be followed by a new one."""
        ids = self.tokens
        for start in range(position, len(ids), IDS_MAX):
            part = tuple(ids[start : start + IDS_MAX])
            draws = start + len(part) == len(ids)
            self._say(self.route[0].peer, PassTokens(self.id, start, part, draws))

    def _say(self, peer: str, message: ServingMessage, payload: bytes = b"") -> None:
        if not self._flows.say(peer, message, payload):
            self._inbox.wake()

    def _drop(self, peer: str | None) -> None:
        """Do without a server from now on: what it holds of the session is of no use any more."""
        if peer is not None:
            self._wired = False
            self._flows.end([peer], self.id)

    # -- the route -----------------------------------------------------------------------------------------------------

    async def _wire(self, end: int) -> None:
        """Find servers for all blocks and have them compute. Raises NoServers, or NetworkError where routes are found
        and none gives a token."""
        began = trio.current_time()
        self._judge.check_fruitless(self._refusal)
        while True:
            if self._servers.commits():  # a run goes on
                await self._servers.refresh(_COMMIT_AGE_S)
            lost = self._flows.lost(self.route)
            for peer in {hop.peer for hop in lost} - self._servers.conduct.without("all"):
                self._judge.failed(peer)
            kept = tuple(hop for hop in self.route if hop not in lost)
            route, answer_s = self._plan(kept), START_S
            if route is None:
                await self._servers.refresh(_RETRY_S if trio.current_time() - began < TOLD_S else _WAIT_RETRY_S)
                route = self._plan(kept) or self._plan(())
            for avoids, within_s in _BETTER_THAN_NONE:
                if route is None:
                    route, answer_s = self._plan((), avoids), within_s
            if route is not None:
                await trio.sleep(self._judge.pause_s())
                if await self._try(route, end, answer_s):
                    return
            if route is None or answer_s < START_S:
                self._servers.check_wait(began, self._refusal, self._needs)
            await trio.sleep(_RETRY_S if route is None else 0)

    def _plan(self, kept: Route, avoids: Avoids = "all") -> Route | None:
        """Return a route. An answer keeps the commit with which it began."""
        if kept or len(self.tokens) > self.drawing.given:
            return self._servers.plan(kept, avoids, self.commit, self._needs)
        route, commit = self._servers.plan_newest(avoids, self._needs)
        if route is not None and commit != self.commit:
            if self._revision:
                self._begin_again()
            self.commit = commit
        return route

    async def _try(self, route: Route, end: int, answer_s: float) -> bool:
        """Wire a route and feed it. Return False if one of its servers fails."""
        fresh = {hop.peer for hop in route if hop not in self.route or hop in self._flows.lost(self.route)}
        self._revision += 1
        if route != self.route:
            self._learn()
        old, self.route = self.route, route
        self._flows.end({hop.peer for hop in old} - {hop.peer for hop in route}, self.id)
        with trio.move_on_after(answer_s) as timeout:
            haves = await self._start_all(route, fresh, end)
        for peer in self._silent if timeout.cancelled_caught else ():
            self._drop(self._judge.failed(peer))
        if timeout.cancelled_caught or haves is None:
            return False
        self._wired = True
        self.drawing.wired()
        self._go_on(haves, fresh | ({route[-1].peer} if self._stalled else set()))
        return True

    async def _start_all(self, route: Route, fresh: set[str], end: int) -> list[int] | None:
        """Wire the session at all servers at once. Return the positions that each has, or None if one fails."""
        self._silent = {hop.peer for hop in route}
        failed = await self._flows.open(route)
        for peer in failed:
            self._drop(self._judge.failed(peer))
        if failed:
            return None
        for peer, rtt_s in self._flows.hold(route).items():
            self._servers.measured(peer, rtt_s)
        begins = self._revision == 1 or len(fresh) == len(route)
        names = page_names(self.tokens, self._needs.wire) if begins and not self.drawing.scores.is_asked else ()
        for index, hop in enumerate(route):
            self._say(hop.peer, placed(self._start_message(end, names), route, index))
        return await self._answers(route)

    def _start_message(self, end: int, names: tuple[bytes, ...]) -> StartSession:
        known, commit = len(self.tokens), self.commit.name if self.commit is not None else self._needs.adapter
        allowed = self.drawing.at_start(known, end)
        settings = self.drawing.sampling, self.drawing.stops
        return StartSession(
            self.id, self._revision, 0, 0, "", "", *settings, names, known, allowed, commit, self._needs.wire
        )

    async def _answers(self, route: Route) -> list[int] | None:
        """Wait for all servers. Tokens that come meanwhile are kept in order, also if one fails: those of a server that
        stays are drawn only once."""
        later = list[Arrival]()
        haves, peers = dict[str, int](), {hop.peer for hop in route}
        try:
            while True:
                for flow, message, at in self._inbox.take():
                    if isinstance(message, TokenDrawn | PromptLogprobs):
                        later.append((flow, message, at))
                    elif getattr(message, "revision", 0) != self._revision or flow.peer not in peers:
                        continue
                    elif not isinstance(message, SessionStarted):
                        self._handle(flow, message)
                        return None
                    elif message.have > self.drawing.ceiling:
                        self._drop(self._judge.misbehaved(flow.peer))
                        return None
                    else:
                        haves[flow.peer] = message.have
                        self._silent.discard(flow.peer)
                if len(haves) == len(route):
                    return [haves[hop.peer] for hop in route]
                if self._flows.lost(route):
                    return None
                await self._inbox.wait()
        finally:
            self._inbox.put_back(later)

    def _go_on(self, haves: list[int], fresh: set[str]) -> None:
        """Have each server send what the next one lacks, and send the first one what it lacks."""
        known, peers = len(self.tokens), [hop.peer for hop in self.route]
        self.failovers += self._last.wired(peers, haves, fresh)
        kept, new = self._last.kept_from(peers), [peer in fresh for peer in peers]
        then = resume(haves, known, new, self._judge.gaps, self.drawing.scores.row(known), kept)
        for number, position in then.rewinds.items():
            self._say(peers[number], Rewind(self.id, position))
            self._last.rewound(peers[number], position)
        for number, position in then.replays.items():
            self._say(peers[number], Replay(self.id, self._revision, position, known))
        if then.feed is not None:
            self._feed(then.feed)

    # -- the end -------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """End the session at all its servers. It may continue later: then all is computed again."""
        self._server_flows.remove(self)
        self._flows.close(self.id)
        self.drawing.close()
        self._wired = False
