"""A client's flows to servers, and which session each message belongs to."""

from __future__ import annotations

from typing import Any

from peer.errors import ProtocolViolation
from peer.net.flow.flow import Flow
from peer.net.host import Host
from swarm.inference.messages import (
    NeighbourLost,
    PromptLogprobs,
    ServingMessage,
    SessionRefused,
    SessionStarted,
    TokenDrawn,
)

_FROM_SERVERS = (SessionStarted, SessionRefused, TokenDrawn, PromptLogprobs, NeighbourLost)


class ServerFlows:
    """Takes what servers send to this client."""

    types: Any = ServingMessage
    payload_max = 0

    def __init__(self, host: Host) -> None:
        self._host = host
        self._sessions: dict[bytes, Any] = {}
        host.flows.serve(self)

    async def open(self, peer: str) -> Flow:
        """Return an open flow with a server. Raises DialError, ConnectionLost or RemoteError."""
        return await self._host.flows.open(peer)

    def add(self, session: Any) -> None:
        """Hand messages to a session from now on."""
        self._sessions[session.id] = session

    def remove(self, session: Any) -> None:
        """Hand no more messages to a session."""
        self._sessions.pop(session.id, None)

    async def on_message(self, flow: Flow, message: Any, payload: memoryview) -> None:
        """Take a message of a server; one for a session that has ended is dropped. Raises ProtocolViolation."""
        if payload.nbytes or not isinstance(message, _FROM_SERVERS):
            raise ProtocolViolation(f"a {type(message).__name__}, which no server sends to a client")
        session = self._sessions.get(message.session)
        if session is not None:
            session.take(flow, message)

    def on_end(self, flow: Flow, reason: str) -> None:
        """Take note that a flow has ended."""
        for session in tuple(self._sessions.values()):
            session.flow_ended(flow)
