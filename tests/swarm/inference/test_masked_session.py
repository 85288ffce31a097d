"""A client's session under a grammar: one mask a token, whichever servers there are, and no token beside the mask."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from peer.errors import BarnraiseError
from peer.ipc.grammar_messages import TokenMask
from peer.notifier import Notifier
from peer.worker.grammar.client import GrammarRefused
from swarm.inference.masks import KeptMasks
from swarm.inference.messages import Allow, PassTokens, StartSession, TokenDrawn
from tests.swarm.inference.scripted_servers import MODEL, STEP_S, Scene, ScriptedServer, _Session, answer_to

PROMPT = [7, 8, 9]


class Grammar:
    """Allows the right token and two others, and ends after some tokens."""

    def __init__(self, length: int = 12, delay_s: float = 0.0, refuses_at: int = -1) -> None:
        self.length, self.delay_s, self.refuses_at = length, delay_s, refuses_at
        self.asked: list[int] = []
        self.closed = 0

    async def mask(self, ids: Sequence[int]) -> TokenMask:
        await trio.sleep(self.delay_s)
        if len(ids) == self.refuses_at:
            raise GrammarRefused("the schema cannot be followed: simplify it")
        self.asked.append(len(ids))
        right = answer_to([*PROMPT], self.length + 1)
        assert list(ids) == right[: len(ids)]
        bits = bytearray((MODEL.vocab_size + 7) // 8)
        for id in (right[len(ids)], 1, 2):
            bits[id >> 3] |= 1 << (id & 7)
        return TokenMask(bytes(bits), len(ids) == self.length)

    def close(self) -> None:
        self.closed += 1


class MaskedServer(ScriptedServer):
    """Draws under masks: the right token, or as `draws` says another one."""

    def __init__(self, scene: Scene, peer: str, first: int, end: int, draws: int | None = None) -> None:
        super().__init__(scene, peer, first, end, step_ms=5.0 if draws is None else 0.001)
        self.draws, self.masks = draws, dict[bytes, tuple[int, KeptMasks, set[int]]]()
        self.payloads: list[int] = []
        self._came = Notifier()

    def send(self, message: Any, payload: bytes = b"") -> None:
        if isinstance(message, StartSession):
            self.masks[message.session] = message.revision, KeptMasks(), set()
        if isinstance(message, Allow) and payload:
            _, kept, positions = self.masks[message.session]
            position, bits = kept.unpack(payload, MODEL.vocab_size)
            self.payloads.append(len(payload))
            assert any(bits)
            positions.add(position)
            self._came.notify()
        super().send(message, payload)

    async def compute(self, held: _Session, message: PassTokens) -> None:
        if self.end < MODEL.layers or not message.draws:
            await super().compute(held, message)
            return
        new = tuple(message.ids[len(held.ids) - message.position :])
        held.ids += new
        if not new or len(held.ids) < held.known:
            return
        await trio.sleep(STEP_S)
        at = len(held.ids)
        while at not in self.masks[held.start.session][2]:
            await self._came.wait()
        token = answer_to(held.ids, 1)[0] if self.draws is None else self.draws
        held.pending = at, token
        self.tell(TokenDrawn(held.start.session, held.start.revision, *held.pending))
        await self._pass_pending(held)


@asynccontextmanager
async def scene() -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        made = Scene(nursery)
        yield made
        nursery.cancel_scope.cancel()


async def said(swarm: Scene, grammar: Grammar, count: int = 40) -> list[int]:
    session = swarm.session(grammar=grammar)
    with trio.fail_after(300):
        tokens = [drawn.token async for drawn in session.generate(PROMPT, count)]
    assert session.drawing.is_complete == (count >= grammar.length)
    session.close()
    assert grammar.closed >= 1
    return tokens


@pytest.mark.parametrize("chain", [[("all", 0, 6)], [("first", 0, 3), ("last", 3, 6)]])
@pytest.mark.parametrize("delay_s", [0.0, 10.0])
async def test_an_answer_ends_where_its_grammar_does(
    chain: list[tuple[str, int, int]], delay_s: float, autojump_clock: trio.testing.MockClock
) -> None:
    """A slow grammar is no fault of the servers."""
    async with scene() as swarm:
        for place in chain:
            swarm.join(MaskedServer(swarm, *place))
        grammar = Grammar(delay_s=delay_s)
        assert await said(swarm, grammar) == answer_to(PROMPT, 12)
        assert grammar.asked == list(range(13)), "once for each position"
        assert all(server.starts == 1 for server in swarm.servers.values())
        last = swarm.servers[chain[-1][0]]
        assert isinstance(last, MaskedServer) and len(last.payloads) == 12
        assert await said(swarm, Grammar(), 5) == answer_to(PROMPT, 5)


async def test_a_server_that_draws_beside_the_mask_is_replaced(autojump_clock: trio.testing.MockClock) -> None:
    async with scene() as swarm:
        swarm.join(MaskedServer(swarm, "first", 0, 3))
        swarm.join(MaskedServer(swarm, "last", 3, 6))
        swarm.join(MaskedServer(swarm, "liar", 3, 6, draws=3))
        assert await said(swarm, Grammar()) == answer_to(PROMPT, 12)
        assert [swarm.servers[peer].starts for peer in ("first", "last", "liar")] == [2, 1, 1]


async def test_a_grammar_that_fails_ends_the_answer(autojump_clock: trio.testing.MockClock) -> None:
    for at in (0, 4):
        async with scene() as swarm:
            swarm.join(MaskedServer(swarm, "all", 0, 6))
            session = swarm.session(grammar=Grammar(refuses_at=at))
            with pytest.raises(BarnraiseError, match="simplify it"):
                async for _ in session.generate(PROMPT, 40):
                    pass
            session.close()
            assert (at > 0) == bool(swarm.begun), "a schema that is refused asks no server"
