"""One session at one server: whom it belongs to, where its tokens come from and go to, and what was sent of it."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from contextlib import ExitStack
from math import inf
from typing import Final

import trio

from peer.errors import ConnectionLost
from peer.ipc.block_messages import ScoredPrompt
from peer.net.flow.flow import Flow
from swarm.inference.messages import (
    Cause,
    NeighbourLost,
    PassTokens,
    PromptLogprobs,
    ServingMessage,
    SessionRefused,
    SessionStarted,
    StartSession,
    TokenDrawn,
)
from swarm.serving.output_log import OutputLog, SentTokens
from swarm.serving.served_drawing import ServedDrawing
from swarm.serving.uplink import UplinkRate

SMALL_BYTES: Final = 60 << 10
"""Payloads up to this size go at once; larger ones in pieces, which small messages pass."""
REASON_CHARS: Final = 300


class ServedSession:
    """A session of the client `flow.peer`; `number` is its name between this process and its worker."""

    def __init__(self, number: int, flow: Flow, start: StartSession, uplink: UplinkRate) -> None:
        self.id: Final = start.session
        self.client: Final = flow.peer
        self.prefix: Final = flow.prefix
        """The address prefix of the client, which may have many keys."""
        self.number: Final = number
        self.flow = flow
        """The flow with the client."""
        self.start = start
        """The last revision."""
        self.wire_type: Final = start.wire
        """Of hidden states that come and go; None: the model's."""
        self.received = 0
        """The position of the token that comes next."""
        self.computed = 0
        """The position after the last output; before `received` while the worker has something to do."""
        self._used_at = trio.current_time()
        self.opened = False
        """Whether the worker has it."""
        self.drawing: Final = ServedDrawing(start)
        self.log = OutputLog(0)
        self.parked = True
        """Whether outputs wait: in the log for the client's `Replay`, which says where the next server stands; a drawn
        token for its `Allow`, as the first server may not have the session before."""
        self.target: Flow | None = None
        """The flow with the peer that tokens go to; None while there is none, and for this peer itself."""
        self.ended_at: float | None = None
        """The client's last contact before its flow ended, in trio's time."""
        self.connecting = trio.CancelScope()
        """In which its target is connected to."""
        self._send_queue: deque[SentTokens] = deque()
        self._draining: trio.CancelScope | None = None
        """In which the queue is sent, large tokens in it."""
        self._uplink = uplink
        self._held_flows = ExitStack()

    @property
    def last_used(self) -> float:
        """When something of it came or was computed last, in trio's time; infinity while the worker has something to
        do."""
        return inf if self.computed < self.received else self._used_at

    def used(self, received: int, computed: int) -> None:
        """Note what has come and what was computed of it, up to these positions."""
        self.received, self.computed, self._used_at = received, computed, trio.current_time()

    def wire(self, flow: Flow, start: StartSession) -> None:
        """Take over a new revision."""
        self.flow, self.start, self.ended_at, self._used_at = flow, start, None, trio.current_time()
        self.drawing.wire(start)
        self.parked = True
        self.set_target(None)

    def set_target(self, flow: Flow | None) -> None:
        """Send tokens to that peer from now on, and watch whether it is alive. Output that waits to be sent is dropped,
        even if a frozen peer has received it in part."""
        self._send_queue.clear()
        if self._draining is not None:
            self._draining.cancel()
            self._draining = None
        self._held_flows.close()
        self.target = flow
        if flow is not None:
            self._held_flows.enter_context(flow.hold())

    def close(self) -> None:
        """Let go of the flows."""
        self.connecting.cancel()
        self.set_target(None)

    # -- to the client -------------------------------------------------------------------------------------------------

    def tell(self, message: ServingMessage) -> None:
        """Send a message to the client. A lost flow says so itself."""
        try:
            self.flow.send(message)
        except ConnectionLost:
            return

    def tell_started(self) -> None:
        self.tell(SessionStarted(self.id, self.start.revision, self.received))

    def refuse(self, cause: Cause, reason: str, have: int | None = None) -> None:
        """Report to the client that the session cannot continue like this."""
        at = self.received if have is None else have
        self.tell(SessionRefused(self.id, self.start.revision, cause, reason[:REASON_CHARS], at))

    def tell_token(self, position: int, token: int, logprob: float, likeliest: tuple[tuple[int, float], ...]) -> None:
        self.tell(TokenDrawn(self.id, self.start.revision, position, token, logprob, likeliest))

    def tell_scores(self, scored: ScoredPrompt) -> None:
        self.tell(PromptLogprobs(self.id, self.start.revision, scored.position, scored.scores))

    def tell_lost(self) -> None:
        """Tell the client that tokens cannot be passed on."""
        self.tell(NeighbourLost(self.id, self.start.revision, self.start.target))

    # -- to the target -------------------------------------------------------------------------------------------------

    def send(self, sent: SentTokens, nursery: trio.Nursery) -> None:
        """Pass tokens on, in order. A large one goes in the background, and what follows waits for it."""
        if self.target is None:
            return  # the log has it, and the next revision asks for it
        if self._draining is not None or len(sent.payload) > SMALL_BYTES:
            self._send_queue.append(sent)
            self._start_draining(self.target, nursery)
            return
        try:
            self.target.send(self._message(sent), sent.payload)
        except ConnectionLost:
            self.tell_lost()

    def replay(self, sent: Iterable[SentTokens], nursery: trio.Nursery) -> None:
        """Send this in place of what waits to be sent, and what comes then after it: in the background, as it may be
        more than the flow keeps for a peer that reads slowly."""
        self.parked = False
        self._send_queue.clear()
        if self.target is not None:
            self._send_queue.extend(sent)
            self._start_draining(self.target, nursery)

    def _start_draining(self, target: Flow, nursery: trio.Nursery) -> None:
        if self._draining is None and self._send_queue:
            self._draining = trio.CancelScope()
            nursery.start_soon(self._drain, target, self._draining)

    async def _drain(self, target: Flow, scope: trio.CancelScope) -> None:
        """Send what waits, until another target is named."""
        began, size = trio.current_time(), 0
        with scope:
            try:
                while self._send_queue:
                    sent = self._send_queue.popleft()
                    await target.send_large(self._message(sent), sent.payload)
                    size += len(sent.payload)
            except ConnectionLost:
                self.set_target(None)
                self.tell_lost()
            else:
                self._draining = None
                self._uplink.sent(size, trio.current_time() - began)

    def _message(self, sent: SentTokens) -> PassTokens:
        return PassTokens(self.id, sent.position, sent.ids, sent.draws)
