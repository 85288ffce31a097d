"""The serving half of a block server: sessions of clients, between the flows and the worker.

Nothing here computes. Tokens come from a flow and go into the worker's ring; what comes out goes to the next server of
the session, and from the last one to the client.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Final

import trio

from peer.errors import BarnraiseError, DialError, ProtocolViolation, StageRefused, WorkerError
from peer.ipc.block_messages import (
    CloseSession,
    ComputeTokens,
    HiddenType,
    OpenSession,
    RewindSession,
    SessionOpened,
    SpanOutput,
    StepRefusal,
    WireType,
    WorkerLoad,
    row_bytes,
    row_bytes_max,
)
from peer.ipc.span import Span
from peer.net.flow.flow import Flow
from peer.net.host import Host
from peer.worker.block_client import BlockWorkerGroup
from swarm.inference.messages import (
    Allow,
    Cause,
    EndSession,
    PassTokens,
    Replay,
    Rewind,
    ServingMessage,
    SessionRefused,
    StartSession,
)
from swarm.serving.output_log import SESSION_BYTES_MAX, OutputLog, SentTokens
from swarm.serving.served_session import ServedSession
from swarm.serving.uplink import UplinkRate

SESSIONS_MAX: Final = 512
SESSIONS_PER_CLIENT_MAX: Final = 64
LOGS_BYTES_MAX: Final = 1 << 30
"""Of what all sessions have sent."""
CLIENT_GRACE_S: Final = 5.0
"""A session whose client is gone ends after so long."""
CLIENT_SILENT_S: Final = 1.5
"""After so long without a beat a client is pinged,"""
CLIENT_ANSWER_S: Final = 1.0
"""and without an answer in this time it is gone."""
_ROOM_S: Final = 0.002
_SWEEP_S: Final = 0.5


@dataclass(frozen=True)
class ServedSpan:
    """What a server computes."""

    span: Span
    hidden_size: int
    """The values of the hidden state of one token."""
    dtype: HiddenType
    """Of these values, unless a session chooses another one for the wire."""
    chunk_tokens: int
    """Of one message at most."""
    context: int
    """The longest session, in tokens."""

    def row_bytes(self, wire: WireType | None) -> int:
        """Return what the hidden state of one token takes on the wire of a session."""
        return row_bytes(self.hidden_size, wire or self.dtype)


class BlockServer:
    """Takes what comes over the flows of one host, for the blocks of one worker."""

    types: Any = ServingMessage

    def __init__(
        self,
        served: ServedSpan,
        worker: BlockWorkerGroup,
        host: Host,
        nursery: trio.Nursery,
        knows: Callable[[str], Awaitable[bool]],
    ) -> None:
        """`knows`: whether a peer has a record as a server, so that a client may have us connect to it."""
        self.served = served
        self.payload_max = row_bytes_max(served.hidden_size) * served.chunk_tokens
        self.leaving = False
        self.uplink = UplinkRate()
        self.tokens = 0
        """Positions computed since the start."""
        self.worked_at = trio.current_time()
        """When something came or went last."""
        self._me, self._flows, self._events = host.peer_id, host.flows, host.events
        self._worker, self._nursery, self._knows = worker, nursery, knows
        self._numbers = itertools.count(1)
        self._sessions: dict[bytes, ServedSession] = {}
        self._by_number: dict[int, ServedSession] = {}
        self._fewer = trio.Event()

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def clients(self) -> frozenset[str]:
        """The peers that have sessions."""
        return frozenset(session.client for session in self._sessions.values())

    def has(self, session: bytes) -> bool:
        """Whether the session of that id is open here."""
        return session in self._sessions

    @property
    def worker_load(self) -> WorkerLoad | None:
        """What the worker reported last."""
        return self._worker.load

    # -- from the flows ------------------------------------------------------------------------------------------------

    async def on_message(self, flow: Flow, message: Any, payload: memoryview) -> None:
        """Take a message of a client or of another server. Raises ProtocolViolation."""
        if isinstance(message, PassTokens):
            await self._take_tokens(flow, message, payload)
            return
        if payload.nbytes:
            raise ProtocolViolation(f"a {type(message).__name__} with a payload")
        session = self._sessions.get(message.session)
        if isinstance(message, StartSession):
            self._start(flow, session, message)
            return
        if session is None:
            return  # it has ended here: its client will notice
        if session.client != flow.peer:
            raise ProtocolViolation(f"a {type(message).__name__} for the session of another client")
        await self._command(session, message)

    def on_end(self, flow: Flow, reason: str) -> None:
        """Take note that a flow has ended."""
        for session in self._sessions.values():
            if session.flow is flow:
                session.ended_at = trio.current_time() - flow.silent_s
            if session.target is flow:
                session.set_target(None)
                session.tell_lost()

    def _start(self, flow: Flow, session: ServedSession | None, start: StartSession) -> None:
        if session is not None:
            if session.client != flow.peer:
                raise ProtocolViolation("a StartSession with the id of another client's session")
            session.wire(flow, start)
            self._nursery.start_soon(self._wire, session)
            return
        refusal = self._refusal(flow.peer, start)
        if refusal is not None:
            flow.send(refusal)
            return
        self.worked_at = trio.current_time()
        session = ServedSession(next(self._numbers), flow, start, self.uplink)
        self._sessions[session.id] = self._by_number[session.number] = session
        self._nursery.start_soon(self._open, session)

    def _refusal(self, client: str, start: StartSession) -> SessionRefused | None:
        span = self.served.span
        if self.leaving:
            return SessionRefused(start.session, start.revision, "leaving", "this server is about to leave")
        if not span.first <= start.first < start.end <= span.end:
            reason = f"this server has blocks [{span.first}, {span.end}), not [{start.first}, {start.end})"
            return SessionRefused(start.session, start.revision, "span", reason)
        count = Counter(session.client for session in self._sessions.values())
        if len(self._sessions) >= SESSIONS_MAX or count[client] >= SESSIONS_PER_CLIENT_MAX:
            return SessionRefused(start.session, start.revision, "full", "too many sessions are open here")
        return None

    async def _open(self, session: ServedSession) -> None:
        """Have the worker begin a session; its answer goes on with `_wire`."""
        start = session.start
        blocks, wire = (start.first, start.end), session.wire_type
        opening = OpenSession(session.number, start.sampling, start.names, *blocks, wire, session.client)
        await self._to_worker(opening, b"", session)

    async def _wire(self, session: ServedSession) -> None:
        """Open the flow to the next peer, then tell the client that the session is wired."""
        session.connecting.cancel()  # for an earlier revision
        revision, target = session.start.revision, session.start.target
        if not session.opened:
            return  # `SessionOpened` comes
        if target and target not in (self._me, session.client):
            flow = None
            with trio.CancelScope() as session.connecting:
                try:
                    if not await self._knows(target):
                        raise DialError("no such server is known", "unreachable")
                    flow = await self._flows.open(target)
                except BarnraiseError:
                    if session.start.revision == revision:
                        session.tell_lost()
            if flow is None or session.start.revision != revision or self._sessions.get(session.id) is not session:
                return
            session.set_target(flow)
        session.tell_started()

    async def _command(self, session: ServedSession, message: Any) -> None:
        if isinstance(message, EndSession):
            await self._end(session)
        elif isinstance(message, Allow):
            session.allow(message.position, message.known)
            session.parked = False  # the client says so once all servers have the session
            await self._pass_held(session)
        elif isinstance(message, Rewind):
            session.received = min(session.received, message.position)
            session.draws_at = {at for at in session.draws_at if at <= message.position}
            session.log.rewind(message.position)
            session.held = None
            await self._to_worker(RewindSession(session.number, message.position), b"", session)
        elif isinstance(message, Replay):
            self._replay(session, message)
        else:
            raise ProtocolViolation(f"a {type(message).__name__}, which only servers send")

    def _replay(self, session: ServedSession, message: Replay) -> None:
        if message.revision != session.start.revision:
            return
        try:
            sent = list(session.log.since(message.position, message.known, self.served.chunk_tokens))
        except ValueError:
            session.refuse("gap", "what was sent of this session is not kept any more", session.log.base)
            return
        session.begin_replay()
        for part in sent:
            session.send(part, self._nursery)

    async def _take_tokens(self, flow: Flow, message: PassTokens, payload: memoryview) -> None:
        session = self._sessions.get(message.session)
        if session is None or flow.peer not in (session.client, session.start.source):
            return  # it has ended here, or that peer has been replaced
        self._check_tokens(session, message, payload)
        await self._compute(session, message, bytes(payload))

    def _check_tokens(self, session: ServedSession, message: PassTokens, payload: memoryview) -> None:
        width = 0 if session.start.first == 0 else self.served.row_bytes(session.wire_type)
        if not message.ids or payload.nbytes != width * len(message.ids):
            raise ProtocolViolation(f"{len(message.ids)} tokens with {payload.nbytes} bytes of hidden states")

    async def _compute(self, session: ServedSession, message: PassTokens, payload: bytes) -> None:
        """Give tokens to the worker. What is here already is dropped, and a gap is told to the client."""
        end = message.position + len(message.ids)
        if message.position > session.received:
            session.refuse("gap", f"position {message.position} comes before {session.received}")
            return
        if end > self.served.context:
            session.refuse("shape", f"{end} tokens exceed the context of {self.served.context}")
            return
        if end <= session.received:
            return
        draws = message.draws and end >= session.known
        if message.draws:
            session.draws_at.add(end)
        session.received = end
        step = ComputeTokens(session.number, message.position, len(message.ids), message.ids, draws)
        await self._to_worker(step, payload, session)

    async def _to_worker(self, message: Any, payload: bytes, session: ServedSession) -> None:
        """Send a message to the worker, once its ring has room."""
        while True:
            try:
                self._worker.send(message, payload)
                return
            except StageRefused:
                await trio.sleep(_ROOM_S)
            except WorkerError as error:
                session.refuse("lost", str(error))
                return

    async def _end(self, session: ServedSession) -> None:
        if self._sessions.pop(session.id, None) is None:
            return
        self._by_number.pop(session.number, None)
        session.close()
        self._fewer.set()
        await self._to_worker(CloseSession(session.number), b"", session)

    # -- from the worker -----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Pass on what the worker computes, until cancelled."""
        self._nursery.start_soon(self._sweep)
        while True:
            try:
                for message, payload in await self._worker.receive():
                    await self._take_output(message, payload)
            except WorkerError as error:
                self.end_all("lost", str(error))

    def end_all(self, cause: Cause, reason: str) -> None:
        """End all sessions, as where the worker that had them is gone."""
        ended = list(self._sessions.values())
        self._sessions.clear()
        self._by_number.clear()
        for session in ended:
            session.refuse(cause, reason, 0)
            session.close()

    async def _take_output(self, message: Any, payload: bytes) -> None:
        session = self._by_number.get(getattr(message, "session", 0))
        if session is None:
            return
        if isinstance(message, SpanOutput):
            self.tokens += message.count
            self.worked_at = trio.current_time()
            await self._pass_on(session, message, payload)
        elif isinstance(message, SessionOpened):
            session.opened, session.received, session.log = True, message.have, OutputLog(message.have)
            self._share_logs()
            self._nursery.start_soon(self._wire, session)
        elif isinstance(message, StepRefusal):
            session.received = message.have
            session.refuse(message.cause, message.message, message.have)
            if not session.opened or message.cause in ("full", "unknown"):
                await self._end(session)  # its client goes elsewhere, or begins it again when there is room

    def _share_logs(self) -> None:
        """Divide the memory of what was sent between the clients, and that of each between its sessions."""
        count = Counter(session.client for session in self._sessions.values())
        for session in self._sessions.values():
            session.log.fit(min(SESSION_BYTES_MAX, LOGS_BYTES_MAX // (len(count) * count[session.client])))

    async def _pass_on(self, session: ServedSession, output: SpanOutput, payload: bytes) -> None:
        if output.wire != session.wire_type:
            session.refuse("lost", "the compute worker answers in another type than it was asked for")
            return
        end = output.position + output.count
        draws = end in session.draws_at
        session.draws_at.discard(end)
        if session.start.end < self.served.span.of:
            sent = SentTokens(output.position, tuple(output.ids), draws, payload)
            session.log.append(sent)
            if not session.parked:
                session.send(sent, self._nursery)
        elif output.token is not None:
            session.tell_token(end, output.token, output.logprob, tuple(output.likeliest))
            session.held = (end, output.token)
            await self._pass_held(session)

    async def _pass_held(self, session: ServedSession) -> None:
        """Send the last drawn token to the first server, if the client allows the next one."""
        if session.held is None or session.parked or not session.may_pass(*session.held):
            return
        if session.start.target != self._me and session.target is None:
            return  # it was lost: nothing else has a copy of it
        (position, token), session.held = session.held, None
        if session.start.target == self._me:
            await self._compute(session, PassTokens(session.id, position, (token,), True), b"")
        else:
            session.send(SentTokens(position, (token,), True, b""), self._nursery)

    # -- ends ----------------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """End the sessions of clients that are gone. Those that live beat, as long as they have a session."""
        while True:
            await trio.sleep(_SWEEP_S)
            async with trio.open_nursery() as nursery:
                for flow in {session.flow for session in self._sessions.values() if session.ended_at is None}:
                    nursery.start_soon(self._flows.end_if_dead, flow, CLIENT_SILENT_S, CLIENT_ANSWER_S)
            now = trio.current_time()
            for session in list(self._sessions.values()):
                if session.ended_at is not None and now - session.ended_at > CLIENT_GRACE_S:
                    self._events.emit("session_dropped", client=session.client)
                    await self._end(session)

    async def leave(self, timeout_s: float) -> None:
        """Take no new sessions, have clients replace this server, and return once they have or time is up."""
        self.leaving = True
        for session in self._sessions.values():
            session.refuse("leaving", "this server is about to leave")
        with trio.move_on_after(timeout_s):
            while self._sessions:
                self._fewer = trio.Event()
                await self._fewer.wait()
