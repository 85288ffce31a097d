"""The flows of one session with the servers of its route."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import trio

from peer.errors import BarnraiseError, ConnectionLost
from peer.net.flow.flow import Flow
from swarm.inference.messages import EndSession, ServingMessage
from swarm.inference.route import Hop, Route
from swarm.inference.server_flows import ServerFlows


class RouteFlows:
    """All messages of a session to its servers pass through this object."""

    def __init__(self, server_flows: ServerFlows) -> None:
        self._server_flows = server_flows
        self._flows: dict[str, Flow] = {}
        self._held = ExitStack()

    async def open(self, route: Route) -> list[str]:
        """Open the flows that are not open. Return the servers with which that failed."""
        failed = list[str]()

        async def open_flow(peer: str) -> None:
            try:
                self._flows[peer] = await self._server_flows.open(peer)
            except BarnraiseError:
                failed.append(peer)

        async with trio.open_nursery() as nursery:
            for hop in self.lost(route):
                nursery.start_soon(open_flow, hop.peer)
        return failed

    def hold(self, route: Route) -> dict[str, float]:
        """Watch whether these servers are alive, and no others. Return the round trips to them, in seconds."""
        self._held.close()
        for hop in route:
            self._held.enter_context(self._flows[hop.peer].hold())
        return {hop.peer: self._flows[hop.peer].rtt_s for hop in route}

    def has(self, flow: Flow) -> bool:
        """Whether it is the flow with one of the servers."""
        return self._flows.get(flow.peer) is flow

    def lost(self, route: Route) -> list[Hop]:
        """Return the hops whose flows are not open."""
        return [hop for hop in route if hop.peer not in self._flows or not self._flows[hop.peer].is_open]

    def say(self, peer: str, message: ServingMessage, payload: bytes = b"") -> bool:
        """Send a message. Return whether the flow existed."""
        try:
            self._flows[peer].send(message, payload)
        except (ConnectionLost, KeyError):
            return False
        return True

    def end(self, peers: Iterable[str], session: bytes) -> None:
        """Say to servers that the session has ended, and let go of them."""
        for peer in tuple(peers):
            flow = self._flows.pop(peer, None)
            if flow is None or not flow.is_open:
                continue
            try:
                flow.send(EndSession(session))
            except ConnectionLost:
                continue

    def close(self, session: bytes) -> None:
        """End the session at all of them."""
        self._held.close()
        self.end(self._flows, session)
