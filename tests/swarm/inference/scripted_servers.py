"""Servers that answer a real `RemoteSession` over flows that are not there: honest ones, and bad ones of every kind.

What they draw is a function of position and of the token before, so that a wrong or missing one is seen. Time is the
mock clock's.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final, cast

import trio

from peer.config import ModelConfig
from peer.errors import DialError
from peer.ipc.block_messages import PAGE_TOKENS, SCORES_MAX
from peer.ipc.sampling_options import OPTIONS, Sampling
from swarm.inference.client_view import ServersView
from swarm.inference.messages import (
    Allow,
    Cause,
    EndSession,
    NeighbourLost,
    PassTokens,
    PromptLogprobs,
    Replay,
    Rewind,
    SessionRefused,
    SessionStarted,
    StartSession,
    TokenDrawn,
)
from swarm.inference.page_names import page_names
from swarm.inference.record import ServerRecord
from swarm.inference.session import RemoteSession

MODEL: Final = ModelConfig(
    hidden_size=8, layers=6, heads=2, kv_heads=2, intermediate_size=8, max_seq_len=4096, vocab_size=300
)
STEP_S: Final = 0.004
GREEDY: Final = Sampling()


def drawn_after(position: int, token: int) -> int:
    """Return what the model draws for a position behind a token."""
    return (7 * position + 3 * token + 1) % MODEL.vocab_size


def answer_to(prompt: Sequence[int], count: int) -> list[int]:
    """Return the right answer to a prompt."""
    text = list(prompt)
    for _ in range(count):
        text.append(drawn_after(len(text), text[-1]))
    return text[len(prompt) :]


def score_of(position: int, token: int) -> tuple[float, tuple[tuple[int, float], ...]]:
    """Return the score of a prompt's token, with two likeliest tokens."""
    best = -0.25 * (position % 7)
    return best - token / 64, ((position % 300, best), ((position + 1) % 300, best - 0.5))


class _Session:
    """What one server has of one session."""

    def __init__(self, start: StartSession) -> None:
        self.start, self.allowed, self.known = start, start.allowed, start.known
        self.ids: list[int] = []
        self.rewinds = self.kept_from = 0
        """The position from which what it computed is kept."""
        self.parked = True
        self.pending: tuple[int, int] | None = None
        """A drawn token (position, id) that may not be passed on yet."""


class ScriptedServer:
    """An honest server of blocks [first, end)."""

    def __init__(self, scene: Scene, peer: str, first: int, end: int, step_ms: float = 5.0) -> None:
        self.scene, self.peer, self.first, self.end, self.step_ms = scene, peer, first, end, step_ms
        self.is_open, self.rtt_s, self.prefix = True, 0.002, "192.0.2.0/24"
        self.starts, self._on_way = 0, deque[Any]()
        self.pages: list[int] = []
        """The tokens of the pages that it has of other sessions."""
        self.refusals = 0
        self._sessions: dict[bytes, _Session] = {}

    @property
    def holds(self) -> int:
        """How many sessions it has."""
        return len(self._sessions)

    def forget_output(self, session: bytes) -> None:
        """Keep no output of a session that there is so far."""
        self._sessions[session].kept_from = len(self._sessions[session].ids)

    # -- a flow, as the client sees it ---------------------------------------------------------------------------------

    def hold(self) -> Any:
        return nullcontext()

    def send(self, message: Any, payload: bytes = b"") -> None:
        self._on_way.append(message)
        self.scene.nursery.start_soon(self._arrive)

    async def _arrive(self) -> None:
        await trio.sleep(self.rtt_s)
        await self._take(self._on_way.popleft())  # in order, whichever task wakes first

    async def _take(self, message: Any) -> None:
        if isinstance(message, StartSession):
            self.starts += 1
            self.scene.begun.append(message)
            held = self._sessions.get(message.session)
            if held is None:
                held = self._sessions[message.session] = _Session(message)
                if message.names and message.names == page_names([*self.pages, 0])[: len(message.names)]:
                    held.ids = list(self.pages[: PAGE_TOKENS * len(message.names)])
                    held.kept_from = len(held.ids)
            held.start, held.parked, held.pending = message, True, None
            held.allowed, held.known = max(held.allowed, message.allowed), max(held.known, message.known)
            await self.started(message, len(held.ids))
            return
        held = self._sessions.get(message.session)
        if held is None:
            return
        if isinstance(message, PassTokens):
            await self.compute(held, message)
        elif isinstance(message, Rewind):
            del held.ids[message.position :]
            held.kept_from, held.pending = min(held.kept_from, message.position), None
            held.rewinds += 1
        elif isinstance(message, Allow):
            held.allowed, held.known = max(held.allowed, message.position), max(held.known, message.known)
            held.parked = False
            await self._pass_pending(held)
        elif isinstance(message, Replay):
            at = message.position
            if at < held.kept_from:
                self.refuse(held, "gap", held.kept_from)
                return
            held.parked = False
            for end in sorted({max(at, min(message.known, len(held.ids))), *range(message.known, len(held.ids) + 1)}):
                if end > at:
                    part = PassTokens(message.session, at, tuple(held.ids[at:end]), end >= message.known)
                    await self.pass_on(held, part)
                    at = end
        elif isinstance(message, EndSession):
            self._sessions.pop(message.session, None)

    def tell(self, message: Any) -> None:
        """Send a message to the client."""
        self.scene.tell(self, message)

    # -- what a server does, and a bad one does otherwise --------------------------------------------------------------

    async def started(self, start: StartSession, have: int) -> None:
        self.tell(SessionStarted(start.session, start.revision, have))

    async def compute(self, held: _Session, message: PassTokens) -> None:
        have = len(held.ids)
        if message.position > have:
            self.refuse(held, "gap")
            return
        new = tuple(message.ids[have - message.position :])
        if not new:
            return
        held.ids += new
        at = len(held.ids)
        rewinds = held.rewinds
        await trio.sleep(STEP_S)
        if held.rewinds != rewinds:
            return
        if self.end < MODEL.layers:
            if not held.parked:
                await self.pass_on(held, PassTokens(message.session, have, new, message.draws))
            return
        self.score(held, range(max(1, have), at))
        if message.draws and at >= held.known:
            held.pending = at, drawn_after(at, new[-1])
            self.tell(TokenDrawn(held.start.session, held.start.revision, *held.pending))
            await self._pass_pending(held)

    def score(self, held: _Session, positions: range) -> None:
        """Tell the scores of these positions of the prompt, in parts."""
        sampling = held.start.sampling
        if sampling.prompt_logprobs:
            asked = [at for at in positions if at < sampling.counted_from]
            for start in range(0, len(asked), SCORES_MAX):
                scores = tuple(score_of(at, held.ids[at]) for at in asked[start : start + SCORES_MAX])
                self.tell(PromptLogprobs(held.start.session, held.start.revision, asked[start], scores))

    async def _pass_pending(self, held: _Session) -> None:
        if held.pending is None or held.parked or not held.known <= held.pending[0] < held.allowed - 1:
            return
        (at, token), held.pending = held.pending, None
        await self.pass_on(held, PassTokens(held.start.session, at, (token,), True))

    async def pass_on(self, held: _Session, message: PassTokens) -> None:
        target = self.scene.servers.get(held.start.target)
        if target is not None:
            target.send(message)

    def refuse(self, held: _Session, cause: Cause, have: int | None = None) -> None:
        have = len(held.ids) if have is None else have
        self.refusals += 1
        self.tell(SessionRefused(held.start.session, held.start.revision, cause, f"it says {cause}", have))


class BadServer(ScriptedServer):
    """A server that is bad in one way, or in another way each time. It claims to be quick."""

    def __init__(self, scene: Scene, peer: str, first: int, end: int, modes: Sequence[str]) -> None:
        super().__init__(scene, peer, first, end, step_ms=0.001)
        self.mode, self._modes = modes[0], modes

    async def started(self, start: StartSession, have: int) -> None:
        self.mode = self._modes[self.starts % len(self._modes)]
        held = self._sessions[start.session]
        if self.mode in ("full", "leaving", "lost", "commit", "unknown"):
            self.refuse(held, cast("Cause", self.mode))
        elif self.mode == "neighbour":
            self.tell(NeighbourLost(start.session, start.revision, start.target))
        elif self.mode == "stranger":
            others = [peer for peer in self.scene.servers if peer not in (self.peer, start.target)]
            self.tell(NeighbourLost(start.session, start.revision, others[0]))
        elif self.mode != "dumb":
            self.tell(SessionStarted(start.session, start.revision, 1 << 24 if self.mode == "have" else have))
        if self.mode == "forger":
            for position in range(start.known, start.allowed):
                self.tell(TokenDrawn(start.session, start.revision, position, 13))

    async def compute(self, held: _Session, message: PassTokens) -> None:
        if self.mode in ("value", "not_finite", "shape", "gap"):
            self.refuse(held, cast("Cause", self.mode))
        elif self.mode == "token":
            self.tell(
                TokenDrawn(held.start.session, held.start.revision, len(held.ids) + len(message.ids), (1 << 24) - 1)
            )
        elif self.mode == "position":
            self.tell(TokenDrawn(held.start.session, held.start.revision, 1 << 24, 1))
        elif self.mode == "flood":
            for number in range(5000):
                self.tell(TokenDrawn(held.start.session, held.start.revision, 0, number % 300))
        elif self.mode == "late":
            await trio.sleep(1.0)
            await super().compute(held, message)
        elif self.mode not in ("mute", "dumb"):
            await super().compute(held, message)


class Scene:
    """A client, and the servers that it knows."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.nursery = nursery
        self.servers: dict[str, ScriptedServer] = {}
        self.begun: list[StartSession] = []
        """What servers were sent of sessions."""
        self.dead = set[str]()
        """Servers to which no flow opens, whose records are still there."""
        self._sessions: dict[bytes, RemoteSession] = {}
        self.view = ServersView(cast(Any, None), cast(Any, None), "run", MODEL.layers)
        self.view.refresh = self._refresh  # type: ignore[method-assign]

    def join(self, server: ScriptedServer) -> None:
        """Let the client know a server."""
        self.servers[server.peer] = server

    def session(self, sampling: Sampling = GREEDY, grammar: Any = None) -> RemoteSession:
        """Return a new session of the client."""
        return RemoteSession(cast(Any, self), self.view, sampling, stops=(), model=MODEL, grammar=grammar)

    async def _refresh(self, age_s: float = 0.0) -> None:
        await trio.lowlevel.checkpoint()
        self.view.records = {
            server.peer: ServerRecord(
                session="1",
                name=server.peer,
                version="1",
                addresses=[],
                joined_at=1.0,
                at=1.0,
                first=server.first,
                end=server.end,
                step_ms=server.step_ms,
                pages=100,
                pages_free=100,
                options=OPTIONS,
            )
            for server in self.servers.values()
        }

    # -- as `ServerFlows` ----------------------------------------------------------------------------------------------

    async def open(self, peer: str) -> ScriptedServer:
        await trio.lowlevel.checkpoint()
        if peer not in self.servers or peer in self.dead:
            raise DialError(peer, "unreachable")
        return self.servers[peer]

    def add(self, session: RemoteSession) -> None:
        self._sessions[session.id] = session

    def remove(self, session: RemoteSession) -> None:
        self._sessions.pop(session.id, None)

    def tell(self, server: ScriptedServer, message: Any) -> None:
        session = self._sessions.get(message.session)
        if session is not None:
            session.take(cast(Any, server), message)

    def flow_ended(self, server: ScriptedServer) -> None:
        """Tell the sessions of the client that a flow has ended."""
        for session in tuple(self._sessions.values()):
            session.flow_ended(cast(Any, server))
