"""A session that its client ends: the server computes no further step of it, and passes nothing on."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import trio

from peer.ipc.block_messages import CloseSession, ComputeTokens, SpanOutput
from peer.ipc.sampling_options import Sampling
from swarm.inference.messages import Allow, EndSession, PassTokens, StartSession, TokenDrawn
from swarm.serving.server import BlockServer
from tests.swarm.serving.test_lost_tokens import SESSION, ScriptedFlow, ScriptedWorker, known, settled


class Recording(ScriptedWorker):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[Any] = []

    def send(self, message: Any, payload: bytes = b"") -> None:
        self.sent.append(message)
        super().send(message, payload)


async def test_the_end_of_a_session_ends_its_work_before_the_next_step() -> None:
    worker, client, first = Recording(), ScriptedFlow("client"), ScriptedFlow("first")

    async def open_flow(peer: str) -> ScriptedFlow:
        await trio.lowlevel.checkpoint()
        return first

    host: Any = SimpleNamespace(peer_id="last", flows=SimpleNamespace(open=open_flow), events=None)
    async with trio.open_nursery() as nursery:
        used: Any = worker
        server = BlockServer(used, host, nursery, known)
        nursery.start_soon(server.run)
        flow: Any = client
        start = StartSession(SESSION, 1, 3, 6, "first", "first", Sampling(), known=2, allowed=50)
        await server.on_message(flow, start, memoryview(b""))
        await settled()
        await server.on_message(flow, Allow(SESSION, 50, 2), memoryview(b""))
        source: Any = first
        await server.on_message(source, PassTokens(SESSION, 0, (5, 6), True), memoryview(bytes(8)))
        assert isinstance(worker.sent[-1], ComputeTokens)
        await server.on_message(flow, EndSession(SESSION), memoryview(b""))
        assert worker.sent[-1] == CloseSession(1) and server.sessions == 0, "behind the step that may be under way"
        worker.gives(SpanOutput(1, 0, 2, 7, 0.0, (), (5, 6)))
        await server.on_message(source, PassTokens(SESSION, 2, (7,), True), memoryview(bytes(4)))
        await settled()
        assert client.of(TokenDrawn) == [] and first.sent == [] and worker.sent[-1] == CloseSession(1)
        nursery.cancel_scope.cancel()
