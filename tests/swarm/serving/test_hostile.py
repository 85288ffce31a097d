"""What no honest client or server sends: refused with a reason, struck where it is an violation, and nothing grows."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import trio

from peer.errors import BarnraiseError
from peer.ipc.block_messages import PAGE_TOKENS, WireType, row_bytes
from peer.ipc.sampling_options import Sampling
from peer.net.flow.flow import Flow
from swarm.inference.client import ModelClient
from swarm.inference.messages import (
    EndSession,
    PassTokens,
    Replay,
    Rewind,
    ServingMessage,
    SessionRefused,
    SessionStarted,
    StartSession,
    TokenDrawn,
)
from swarm.inference.page_names import page_names
from swarm.serving.session_table import SESSIONS_PER_CLIENT_MAX
from tests.swarm.serving.serving_swarm import SIZES, ServingSwarm, open_serving, reference_tokens

pytestmark = pytest.mark.process

WIDTH = 4 * SIZES["hidden_size"]
FRAMES = 10_000
TOKENS = 200
PROMPT = list(range(40))
LONG = [(7 * i) % 300 for i in range(2000)]


class Intruder:
    """A client that says what it likes, in a session of its own."""

    def __init__(self, model: ModelClient) -> None:
        self._model = model
        self.heard: list[Any] = []
        self.news = trio.Event()
        self.id = b""

    async def flow_with(self, swarm: ServingSwarm, name: str) -> Flow:
        peer = next(peer for peer, record in self._model.servers.records.items() if record.name == name)
        return await self._model.server_flows.open(peer)

    async def start(
        self, flow: Flow, first: int, end: int, wire: WireType | None = None, names: tuple[bytes, ...] = ()
    ) -> int:
        """Begin a session, and hear all that is said about it. Return how many positions the server has of it."""
        self.id = secrets.token_bytes(16)
        self._model.server_flows.add(self)
        flow.send(StartSession(self.id, 1, first, end, "", "", Sampling(), names=names, wire=wire))
        started: SessionStarted = await self.hear(SessionStarted)
        return started.have

    def take(self, flow: Flow, message: ServingMessage) -> None:
        self.heard.append(message)
        self.news.set()

    def flow_ended(self, flow: Flow) -> None:
        self.news.set()

    async def hear(self, kind: type[Any]) -> Any:
        """Return the next message of that kind; others before it are forgotten."""
        with trio.fail_after(300):
            while True:
                while self.heard:
                    message = self.heard.pop(0)
                    if isinstance(message, kind):
                        return message
                self.news = trio.Event()
                await self.news.wait()


async def ended(flow: Flow) -> None:
    with trio.fail_after(300):
        await flow.ended.wait()


async def test_what_is_wrong_is_refused_and_what_is_an_violation_ends_the_flow(tmp_path: Path) -> None:
    async with open_serving(tmp_path, s0="0:3", s1="3:6") as swarm, swarm.client() as model, swarm.client() as other:
        me = Intruder(model)

        # -- refused with a reason ---------------------------------------------------------------------------------
        flow = await me.flow_with(swarm, "s0")
        await me.start(flow, 0, 3)
        flow.send(PassTokens(me.id, 7, (1,), True))
        assert (await me.hear(SessionRefused)).cause == "gap"
        flow.send(PassTokens(me.id, 0, (SIZES["vocab_size"],), True))
        assert (await me.hear(SessionRefused)).cause == "value"
        flow.send(PassTokens(me.id, 0, tuple([1] * 4000), True))
        flow.send(PassTokens(me.id, 4000, tuple([1] * 200), True))
        refused = await me.hear(SessionRefused)
        assert refused.cause == "shape" and "context" in refused.reason
        flow.send(EndSession(me.id))
        await me.start(flow, 1, 3)  # a part of its blocks
        flow.send(PassTokens(me.id, 0, (1, 2), True), b"\0" * 2 * WIDTH)
        flow.send(PassTokens(me.id, 2, (3,), True), msgspec.json.encode(None).ljust(WIDTH, b"\xff"))
        assert (await me.hear(SessionRefused)).cause == "not_finite"
        flow.send(EndSession(me.id))
        await me.start(flow, 1, 3, "int8")
        flow.send(PassTokens(me.id, 0, (1,), True), b"\xff" * row_bytes(SIZES["hidden_size"], "int8"))
        assert (await me.hear(SessionRefused)).cause == "not_finite"
        assert flow.is_open, "honest clients make such mistakes"

        # -- violations ----------------------------------------------------------------------------------------------
        theirs = Intruder(other)
        their_flow = await theirs.flow_with(swarm, "s0")
        await theirs.start(their_flow, 0, 3)
        violations: list[tuple[Any, bytes]] = [
            (PassTokens(me.id, 0, (1, 2), True), b"\0" * WIDTH),
            (PassTokens(me.id, 0, (), True), b""),
            (EndSession(theirs.id), b""),
            (Rewind(theirs.id, 0), b""),
            (Replay(theirs.id, 1, 0, 0), b""),
            (StartSession(theirs.id, 2, 0, 3, "", "", Sampling()), b""),
            (TokenDrawn(me.id, 1, 0, 1), b""),
            (EndSession(me.id), b"with a payload"),
            (Unknown(1), b""),
        ]
        for message, payload in violations:
            flow = await me.flow_with(swarm, "s0")
            await me.start(flow, 1, 3)
            message = msgspec.structs.replace(message, session=me.id) if needs(message, me, theirs) else message
            flow.send(message, payload)
            await ended(flow)
        flow = await me.flow_with(swarm, "s0")
        await me.start(flow, 1, 3, "int8")
        flow.send(PassTokens(me.id, 0, (1,), True), b"\0" * WIDTH)  # of the model's own type
        await ended(flow)
        their_flow.send(PassTokens(theirs.id, 0, (1,), True))
        assert their_flow.is_open and await said(swarm, other) == reference_tokens([1, 2], 12)


async def test_pages_under_anothers_names_change_no_answer_and_tell_nothing(tmp_path: Path) -> None:
    """A reader calls its own tokens, or hidden states, what others will call the beginning of their texts."""
    names = page_names(PROMPT)
    async with open_serving(tmp_path, s0="0:3", s1="3:6") as swarm, swarm.client() as model, swarm.client() as other:
        me, theirs = Intruder(model), Intruder(other)
        for server, first, end in (("s0", 0, 3), ("s1", 3, 6)):
            flow, payload = await me.flow_with(swarm, server), b"" if first == 0 else b"\0" * WIDTH * len(PROMPT)
            while await me.start(flow, first, end, names=names) != len(names) * PAGE_TOKENS:  # until it was computed
                flow.send(PassTokens(me.id, 0, tuple(reversed(PROMPT)), False), payload)
                flow.send(EndSession(me.id))
            assert await theirs.start(await theirs.flow_with(swarm, server), first, end, names=names) == 0
        assert await said(swarm, other, PROMPT) == reference_tokens(PROMPT, 12)


class Unknown(msgspec.Struct, frozen=True, array_like=True, tag=77):
    number: int


def needs(message: Any, me: Intruder, theirs: Intruder) -> bool:
    """Whether a message is about the intruder's own session, which is another one each time."""
    return hasattr(message, "session") and message.session != theirs.id


async def said(swarm: ServingSwarm, model: ModelClient, prompt: Sequence[int] = (1, 2)) -> list[int]:
    session = model.session(Sampling())
    try:
        with trio.fail_after(300):
            return [drawn.token async for drawn in session.generate(prompt, 12)]
    finally:
        session.close()


async def test_floods_cost_no_memory_and_too_many_sessions_are_refused(tmp_path: Path) -> None:
    async with few_pages(tmp_path) as swarm, swarm.client() as model:
        me = Intruder(model)
        flow = await me.flow_with(swarm, "s0")
        network = psutil.Process(swarm.servers["s0"].process.pid)
        await me.start(flow, 0, 6)
        await flood(me, flow, FRAMES // 10)
        before = network.memory_info().rss
        await flood(me, flow, FRAMES)
        assert network.memory_info().rss - before < 20 << 20
        flow.send(EndSession(me.id))
        mine = list[bytes]()
        for _ in range(SESSIONS_PER_CLIENT_MAX):
            await me.start(flow, 0, 6)
            mine.append(me.id)
        me.id = secrets.token_bytes(16)
        model.server_flows.add(me)
        flow.send(StartSession(me.id, 1, 0, 6, "", "", Sampling()))
        assert (await me.hear(SessionRefused)).cause == "full"
        with pytest.raises(BarnraiseError):  # this client has them all
            await said(swarm, model)
        for session in mine:
            flow.send(PassTokens(session, 0, tuple([1] * TOKENS), True))
        await few_pages_are_free(model)
        async with swarm.client() as other:
            assert await said(swarm, other, LONG) == reference_tokens(LONG, 12)


@asynccontextmanager
async def few_pages(folder: Path) -> AsyncIterator[ServingSwarm]:
    """One server, whose pages a client's sessions of so many tokens are enough to fill."""
    async with open_serving(folder) as swarm:
        await swarm.serve("s0", "0:6", "--memory", "0.01")
        yield swarm


async def few_pages_are_free(model: ModelClient) -> None:
    """Wait until the only server has less room than a long prompt takes."""
    with trio.fail_after(300):
        while True:
            await model.servers.refresh(0.0)
            (record,) = model.servers.records.values()
            if record.pages_free * PAGE_TOKENS < len(LONG) < record.pages * PAGE_TOKENS // 2:
                return
            await trio.sleep(0.1)


async def flood(me: Intruder, flow: Flow, frames: int) -> None:
    """Send what is dropped, unknown or out of place, and wait until all of it was read."""
    for number in range(frames):
        flow.send(EndSession(secrets.token_bytes(16)))
        flow.send(PassTokens(secrets.token_bytes(16), number, (1,), False))
        if number % 100 == 0:
            await trio.lowlevel.checkpoint()
    flow.send(PassTokens(me.id, 9, (1,), True))
    assert (await me.hear(SessionRefused)).cause == "gap"
