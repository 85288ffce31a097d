"""What the last server does with masks: good ones go to its worker, wrong ones end their session."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from peer.errors import ProtocolViolation
from peer.ipc.block_messages import CloseSession, MaskedToken, SetMask, SpanOutput
from peer.ipc.sampling_options import Sampling
from swarm.inference.masks import KeptMasks
from swarm.inference.messages import Allow, PassTokens, Rewind, SessionRefused, StartSession, TokenDrawn
from swarm.serving.server import BlockServer
from tests.swarm.serving.test_lost_tokens import SESSION, ScriptedFlow, ScriptedWorker, known, settled

BITS = bytes([0b1010, *[0] * 11, 0b1000])
"""Tokens 1, 3 and 99, of 100."""


class Recording(ScriptedWorker):
    """Keeps what it is sent."""

    def __init__(self) -> None:
        super().__init__()
        self.sent: list[tuple[Any, bytes]] = []

    def send(self, message: Any, payload: bytes = b"") -> None:
        self.sent.append((message, payload))
        super().send(message, payload)


class Scene:
    """The last server, its worker, its client, and the first server."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.worker, self.client, self.first = Recording(), ScriptedFlow("client"), ScriptedFlow("first")

        async def open_flow(peer: str) -> ScriptedFlow:
            await trio.lowlevel.checkpoint()
            return self.first

        host: Any = SimpleNamespace(peer_id="last", flows=SimpleNamespace(open=open_flow), events=None)
        used: Any = self.worker
        self.server = BlockServer(used, host, nursery, known)
        nursery.start_soon(self.server.run)

    async def start(self, revision: int = 1, masked: bool = True) -> None:
        sampling = Sampling(masked=masked)
        await self.says(StartSession(SESSION, revision, 3, 6, "first", "first", sampling, known=2, allowed=4))
        await settled()

    async def says(self, message: Any, payload: bytes = b"") -> None:
        flow: Any = self.client
        await self.server.on_message(flow, message, memoryview(payload))


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        yield Scene(nursery)
        nursery.cancel_scope.cancel()


async def test_a_mask_goes_to_the_worker_and_its_token_to_the_client_and_the_first_server() -> None:
    async with scene() as one:
        await one.start()
        masks = KeptMasks()
        source: Any = one.first
        await one.server.on_message(source, PassTokens(SESSION, 0, (5, 6), True), memoryview(bytes(8)))
        one.worker.gives(SpanOutput(1, 0, 2, None, 0.0, (), (5, 6)))
        await settled()
        assert one.client.of(TokenDrawn) == []
        await one.says(Allow(SESSION, 4, 2), masks.pack(2, BITS))
        assert one.worker.sent[-1] == (SetMask(1, 2), BITS)
        one.worker.gives(MaskedToken(1, 2, 3, -0.5, ((3, -0.5),)))
        await settled()
        assert one.client.of(TokenDrawn) == [TokenDrawn(SESSION, 1, 2, 3, -0.5, ((3, -0.5),))]
        assert one.first.sent == [PassTokens(SESSION, 2, (3,), True)], "the next position is computed meanwhile"
        same = masks.pack(3, BITS)
        await one.says(Allow(SESSION, 5, 2), same)
        assert len(same) == 9 and one.worker.sent[-1] == (SetMask(1, 3), BITS)
        await one.start(revision=2)
        await one.says(Allow(SESSION, 5, 2), same)
        assert one.client.of(SessionRefused)[-1].cause == "value", "another revision has no mask yet"


@pytest.mark.parametrize("payload", [b"1", KeptMasks().pack(2, bytes(13)), b"\2\0\0\0\2\1\0\0\0", None])
async def test_a_wrong_mask_ends_its_session(payload: bytes | None) -> None:
    """None: a good one, for a session that is not masked."""
    async with scene() as one:
        await one.start(masked=payload is not None)
        await one.says(Allow(SESSION, 4, 2), KeptMasks().pack(2, BITS) if payload is None else payload)
        (refused,) = one.client.of(SessionRefused)
        assert refused.cause == "value" and "mask" in refused.reason
        assert one.server.sessions == 0 and one.worker.sent[-1] == (CloseSession(1), b"")


async def test_no_other_message_has_a_mask() -> None:
    async with scene() as one:
        await one.start()
        with pytest.raises(ProtocolViolation):
            await one.says(Rewind(SESSION, 1), KeptMasks().pack(2, BITS))
