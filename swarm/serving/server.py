"""The serving half of a block server: sessions of clients, between the flows and the worker.

Nothing here computes. Tokens come from a flow and go into the worker's ring; what comes out goes to the next server of
the session, and from the last one to the client.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

import trio

from peer.errors import BarnraiseError, DialError, ProtocolViolation, StageRefused, WorkerError
from peer.ipc.block_messages import (
    CloseSession,
    ComputeTokens,
    MaskedToken,
    OpenSession,
    RewindSession,
    ScoredPrompt,
    SessionOpened,
    SetMask,
    SpanOutput,
    StepRefusal,
    WorkerLoad,
    row_bytes,
    row_bytes_max,
)
from peer.net.flow.flow import Flow
from peer.net.host import Host
from peer.notifier import Notifier
from peer.worker.block_client import BlockWorkerGroup
from swarm.inference.masks import mask_payload_max
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
from swarm.serving.output_log import OutputLog, SentTokens
from swarm.serving.served_session import ServedSession
from swarm.serving.session_table import SessionTable
from swarm.serving.uplink import UplinkRate

CLIENT_GRACE_S: Final = 5.0
"""A session whose client is gone ends after this long."""
CLIENT_SILENT_S: Final = 1.5
"""After this long without a beat a client is pinged,"""
CLIENT_ANSWER_S: Final = 1.0
"""and without an answer in this time it is gone."""
_ROOM_S: Final = 0.002
_SWEEP_S: Final = 0.5


class BlockServer:
    """Takes what comes over the flows of one host, for the blocks of one worker."""

    types: Any = ServingMessage

    def __init__(
        self,
        worker: BlockWorkerGroup,
        host: Host,
        nursery: trio.Nursery,
        knows: Callable[[str], Awaitable[bool]],
        adapters: Mapping[bytes, int] | None = None,
    ) -> None:
        """`knows`: whether a peer has a record as a server, so that a client may have us connect to it. `adapters`:
        the numbers of the worker's, by what `StartSession.commit` says; None: that means nothing to the worker."""
        self._config = worker.config
        model = worker.config.model
        rows = row_bytes_max(model.hidden_size) * worker.config.chunk_tokens
        self.payload_max = max(rows, mask_payload_max(model.vocab_size))
        self.leaving = False
        self.uplink = UplinkRate()
        self.tokens = 0
        """Positions computed since the start."""
        self.worked_at = trio.current_time()
        """When something came or went last."""
        self._me, self._flows, self._events = host.peer_id, host.flows, host.events
        self._worker, self._nursery, self._knows = worker, nursery, knows
        self._adapters = adapters
        self._numbers = itertools.count(1)
        self._sessions = SessionTable()
        self._fewer = Notifier()

    @property
    def sessions(self) -> int:
        return len(self._sessions)

    @property
    def clients(self) -> frozenset[str]:
        """The peers that have sessions."""
        return self._sessions.clients

    def has(self, session: bytes) -> bool:
        """Whether the session of that id is open here."""
        return self._sessions.find(session) is not None

    @property
    def worker_load(self) -> WorkerLoad | None:
        """The worker's last report."""
        return self._worker.load

    # -- from the flows ------------------------------------------------------------------------------------------------

    async def on_message(self, flow: Flow, message: Any, payload: memoryview) -> None:
        """Take a message of a client or of another server. Raises ProtocolViolation for what the sender itself has made
        up: what a client has two servers say to each other ends its session, and nothing else."""
        if isinstance(message, PassTokens):
            await self._take_tokens(flow, message, payload)
            return
        if payload.nbytes and not isinstance(message, Allow):
            raise ProtocolViolation(f"a {type(message).__name__} with a payload")
        session = self._sessions.find(message.session)
        if isinstance(message, StartSession):
            await self._start(flow, session, message)
            return
        if session is None:
            return  # it has ended here: its client will notice
        if session.client != flow.peer:
            raise ProtocolViolation(f"a {type(message).__name__} for the session of another client")
        await self._command(session, message, payload)

    def on_end(self, flow: Flow, reason: str) -> None:
        """Take note that a flow has ended."""
        for session in self._sessions:
            if session.flow is flow:
                session.ended_at = trio.current_time() - flow.silent_s
            if session.target is flow:
                session.set_target(None)
                session.tell_lost()

    async def _start(self, flow: Flow, session: ServedSession | None, start: StartSession) -> None:
        if session is not None:
            if session.client != flow.peer:
                raise ProtocolViolation("a StartSession with the id of another client's session")
            if (start.first, start.end) == (session.start.first, session.start.end):
                session.wire(flow, start)
                self._nursery.start_soon(self._wire, session)
                return
            await self._end(session)  # the worker has it for other blocks
        refusal = self._refusal(start)
        if refusal is not None:
            flow.send(refusal)
            return
        session = ServedSession(next(self._numbers), flow, start, self.uplink)
        loser = self._sessions.add(session)
        if loser is session:
            flow.send(SessionRefused(start.session, start.revision, "full", "too many sessions are open here"))
            return
        self.worked_at = trio.current_time()
        self._nursery.start_soon(self._open, session)
        if loser is not None:
            await self._end(loser, "full", "another client needs the place of this session")

    def _refusal(self, start: StartSession) -> SessionRefused | None:
        span = self._config.span
        if self.leaving:
            return SessionRefused(start.session, start.revision, "leaving", "this server is about to leave")
        if not span.first <= start.first < start.end <= span.end:
            reason = f"this server has blocks [{span.first}, {span.end}), not [{start.first}, {start.end})"
            return SessionRefused(start.session, start.revision, "span", reason)
        if start.commit and self._adapters is not None and start.commit not in self._adapters:
            return SessionRefused(start.session, start.revision, "value", "this server has no such adapter")
        return None

    async def _open(self, session: ServedSession) -> None:
        """Have the worker begin a session; its answer continues in `_wire`."""
        start = session.start
        blocks, wire = (start.first, start.end), session.wire_type
        adapter = None if self._adapters is None else self._adapters.get(start.commit)
        opening = OpenSession(
            session.number, start.sampling, start.names, *blocks, wire, session.client, session.prefix, adapter
        )
        await self._to_worker(opening, b"", session)

    async def _wire(self, session: ServedSession) -> None:
        """Open the flow to the next peer, then report to the client that the session is wired."""
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
            if flow is None or session.start.revision != revision or session not in self._sessions:
                return
            if not flow.is_member:
                session.tell_lost()  # a client, which would take us for the one that sends it tokens
                return
            session.set_target(flow)
        session.tell_started()

    async def _command(self, session: ServedSession, message: Any, payload: memoryview) -> None:
        if isinstance(message, EndSession):
            await self._end(session)
        elif isinstance(message, Allow):
            session.drawing.allow(message.position, message.known)
            session.parked = False  # the client says so once all servers have the session
            await self._pass_held(session)
            if payload.nbytes:
                await self._set_mask(session, payload)
        elif isinstance(message, Rewind):
            session.used(min(session.received, message.position), min(session.computed, message.position))
            session.drawing.rewind(message.position)
            session.log.rewind(message.position)
            await self._to_worker(RewindSession(session.number, message.position), b"", session)
        elif isinstance(message, Replay):
            if message.revision == session.start.revision:
                self._replay(session, message)
        else:
            raise ProtocolViolation(f"a {type(message).__name__}, which only servers send")

    async def _set_mask(self, session: ServedSession, payload: memoryview) -> None:
        """Have the worker draw under a mask. A wrong one ends the session: its client made it up."""
        try:
            position, bits = session.drawing.mask(payload, self._config.model.vocab_size)
        except ValueError as error:
            await self._end(session, "value", str(error))
        else:
            await self._to_worker(SetMask(session.number, position), bits, session)

    def _replay(self, session: ServedSession, message: Replay) -> None:
        try:
            sent = list(session.log.since(message.position, message.known, self._config.chunk_tokens))
        except ValueError as error:
            session.refuse("gap", str(error), session.log.base)
            return
        session.replay(sent, self._nursery)

    async def _take_tokens(self, flow: Flow, message: PassTokens, payload: memoryview) -> None:
        session = self._sessions.find(message.session)
        if session is None or flow.peer not in (session.client, session.start.source):
            return  # it has ended here, or that peer has been replaced
        wire = session.wire_type or self._config.dtype
        width = 0 if session.start.first == 0 else row_bytes(self._config.model.hidden_size, wire)
        if message.ids and payload.nbytes == width * len(message.ids):
            await self._compute(session, message, bytes(payload))
            return
        wrong = f"{len(message.ids)} tokens with {payload.nbytes} bytes of hidden states"
        if flow.peer == session.client:
            raise ProtocolViolation(wrong)
        # Its client chose the blocks, the type on the wire and the peers before and behind, at each server for itself.
        await self._end(session, "shape", f"{wrong}, where one takes {width}")

    async def _compute(self, session: ServedSession, message: PassTokens, payload: bytes) -> None:
        """Give tokens to the worker. Tokens that it already has are dropped, and a gap is reported to the client."""
        end = message.position + len(message.ids)
        if message.position > session.received:
            session.refuse("gap", f"position {message.position} comes before {session.received}")
            return
        if end > (context := self._config.model.max_seq_len):
            session.refuse("shape", f"{end} tokens exceed the context of {context}")
            return
        if end <= session.received:
            return
        draws = message.draws and session.drawing.ask(end)
        session.used(end, session.computed)
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

    async def _end(self, session: ServedSession, cause: Cause | None = None, reason: str = "") -> None:
        """End a session. `cause`: reported to its client, unless the client asked for the end."""
        if not self._sessions.remove(session):
            return
        if cause is not None:
            session.refuse(cause, reason)
        session.close()
        self._fewer.notify()
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
        for session in self._sessions:
            self._sessions.remove(session)
            session.refuse(cause, reason, 0)
            session.close()

    async def _take_output(self, message: Any, payload: bytes) -> None:
        session = self._sessions.numbered(getattr(message, "session", 0))
        if session is None:
            return
        if isinstance(message, SpanOutput):
            self.tokens += message.count
            self.worked_at = trio.current_time()
            await self._pass_on(session, message, payload)
        elif isinstance(message, MaskedToken):
            session.tell_token(message.position, message.token, message.logprob, message.likeliest)
            session.drawing.hold(message.position, message.token)
            await self._pass_held(session)
        elif isinstance(message, ScoredPrompt):
            session.tell_scores(message)
        elif isinstance(message, SessionOpened):
            session.opened, session.log = True, OutputLog(message.have)
            session.used(message.have, message.have)
            self._sessions.share_logs()
            self._nursery.start_soon(self._wire, session)
        elif isinstance(message, StepRefusal):
            session.used(message.have, min(session.computed, message.have))
            session.refuse(message.cause, message.message, message.have)
            if not session.opened or message.cause in ("full", "unknown"):
                await self._end(session)  # its client goes elsewhere, or begins it again when there is room

    async def _pass_on(self, session: ServedSession, output: SpanOutput, payload: bytes) -> None:
        if output.wire != session.wire_type:
            session.refuse("lost", "the compute worker answers in another type than it was asked for")
            return
        end = output.position + output.count
        session.used(session.received, min(end, session.received))
        draws = session.drawing.was_asked(end)
        if session.start.end < self._config.span.of:
            sent = SentTokens(output.position, tuple(output.ids), draws, payload)
            if session.log.append(sent) and not session.parked:
                session.send(sent, self._nursery)
        elif output.token is not None:
            session.tell_token(end, output.token, output.logprob, tuple(output.likeliest))
            session.drawing.hold(end, output.token)
            await self._pass_held(session)

    async def _pass_held(self, session: ServedSession) -> None:
        """Send the last drawn token to the first server, if the client allows the next one."""
        is_alone = session.start.target == self._me
        if session.parked or not (is_alone or session.target):
            return  # that flow was lost: nothing else has a copy of the token
        held = session.drawing.take()
        if held is None:
            return
        position, token = held
        if is_alone:
            await self._compute(session, PassTokens(session.id, position, (token,), True), b"")
        else:
            session.send(SentTokens(position, (token,), True, b""), self._nursery)

    # -- ends ----------------------------------------------------------------------------------------------------------

    async def _sweep(self) -> None:
        """End the sessions of clients that are gone. Those that live beat, as long as they have a session."""
        while True:
            await trio.sleep(_SWEEP_S)
            async with trio.open_nursery() as nursery:
                for flow in {session.flow for session in self._sessions if session.ended_at is None}:
                    nursery.start_soon(self._flows.end_if_dead, flow, CLIENT_SILENT_S, CLIENT_ANSWER_S)
            now = trio.current_time()
            for session in self._sessions:
                if session.ended_at is not None and now - session.ended_at > CLIENT_GRACE_S:
                    self._events.emit("session_dropped", client=session.client)
                    await self._end(session)

    async def leave(self, timeout_s: float) -> None:
        """Take no new sessions, have clients replace this server, and return once they have or time is up."""
        self.leaving = True
        for session in self._sessions:
            session.refuse("leaving", "this server is about to leave")
        with trio.move_on_after(timeout_s):
            while self._sessions:
                await self._fewer.wait()
