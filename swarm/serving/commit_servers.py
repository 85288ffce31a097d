"""The commits of a run that one host serves at a time: a block server each, behind one handler of flows.

An answer keeps the commit with which it began. So while a newer commit takes the new sessions, the one before stays
until its own have ended.
"""

from __future__ import annotations

from typing import Any

import trio

from peer.net.flow.flow import Flow
from swarm.inference.messages import ServingMessage, SessionRefused, StartSession
from swarm.inference.record import ServedCommit
from swarm.serving.server import BlockServer


class CommitServers:
    """Hands each message to the server of its session's commit. Implements `peer.net.flow.flow.FlowHandler`."""

    types: Any = ServingMessage

    def __init__(self, payload_max: int) -> None:
        self.payload_max = payload_max
        self._servers: dict[bytes, tuple[ServedCommit, BlockServer]] = {}

    @property
    def commits(self) -> tuple[ServedCommit, ...]:
        """The served commits, newest first."""
        return tuple(commit for commit, _ in reversed(self._servers.values()))

    @property
    def servers(self) -> tuple[BlockServer, ...]:
        """The servers of these commits, in the same order."""
        return tuple(server for _, server in reversed(self._servers.values()))

    def add(self, commit: ServedCommit, server: BlockServer) -> None:
        """Serve another commit, the newest from now on."""
        self._servers[commit.name] = (commit, server)

    def remove(self, commit: ServedCommit) -> None:
        """Serve a commit no longer. Its sessions have been ended."""
        self._servers.pop(commit.name, None)

    def stop_admitting(self) -> bool:
        """Take no new sessions; return whether some are open."""
        for server in self.servers:
            server.leaving = True
        return any(server.sessions for server in self.servers)

    async def leave(self, timeout_s: float) -> None:
        """Have clients replace these servers, and return once they have or time is up."""
        async with trio.open_nursery() as nursery:
            for server in self.servers:
                nursery.start_soon(server.leave, timeout_s)

    async def on_message(self, flow: Flow, message: Any, payload: memoryview) -> None:
        """Take a message of a client or of another server. Raises ProtocolViolation."""
        server = next((server for server in self.servers if server.has(message.session)), None)
        if server is None and isinstance(message, StartSession):
            found = self._servers.get(message.commit)
            if found is None:
                reason = "this server has moved to another commit"
                flow.send(SessionRefused(message.session, message.revision, "commit", reason))
                return
            server = found[1]
        if server is None:  # the session has ended here; a server judges the message
            server = next(iter(self.servers), None)
        if server is not None:
            await server.on_message(flow, message, payload)

    def on_end(self, flow: Flow, reason: str) -> None:
        """Take note that a flow has ended."""
        for server in self.servers:
            server.on_end(flow, reason)
