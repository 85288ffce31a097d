"""Moments of a replacement at which a drawn token has no second copy: it must not be lost. The other side is scripted,
since real processes are in such a moment only now and then."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import trio
import trio.testing

from peer.config import ModelConfig
from peer.errors import NetworkError
from peer.ipc.block_messages import OpenSession, SessionOpened, SpanOutput
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span
from swarm.inference.conduct import ServerConduct
from swarm.inference.messages import (
    Allow,
    NeighbourLost,
    PassTokens,
    Rewind,
    ServingMessage,
    SessionStarted,
    StartSession,
    TokenDrawn,
)
from swarm.inference.route import Hop
from swarm.inference.session import RemoteSession
from swarm.serving.output_log import SentTokens
from swarm.serving.served_session import SMALL_BYTES, ServedSession
from swarm.serving.server import BlockServer
from swarm.serving.uplink import UplinkRate

SESSION = b"s" * 16
MODEL = ModelConfig(hidden_size=8, layers=6, heads=2, kv_heads=2, intermediate_size=8, max_seq_len=100, vocab_size=100)


class ScriptedFlow:
    """Keeps what is sent over it, and hands it to `hears`."""

    def __init__(self, peer: str, prefix: str = "", is_member: bool = True) -> None:
        self.peer, self.prefix, self.is_member = peer, prefix, is_member
        self.sent: list[Any] = []
        self.is_open, self.rtt_s, self.frozen = True, 0.0, False
        self.hears: Any = lambda message: None

    def send(self, message: ServingMessage, payload: bytes = b"") -> None:
        self.sent.append(message)
        self.hears(message)

    async def send_large(self, message: ServingMessage, payload: bytes) -> None:
        await (trio.sleep_forever() if self.frozen else trio.lowlevel.checkpoint())
        self.send(message, payload)

    def hold(self) -> Any:
        return nullcontext()

    def of(self, kind: type[Any]) -> list[Any]:
        return [message for message in self.sent if isinstance(message, kind)]


class ScriptedWorker:
    """Opens sessions with blocks [3, 6) of so many; what it computes comes from the test."""

    def __init__(self, of: int = 6) -> None:
        model = SimpleNamespace(hidden_size=1, max_seq_len=100, vocab_size=100)
        self.config = SimpleNamespace(model=model, span=Span(3, 6, of), dtype="fp32", chunk_tokens=16)
        self._send, self._receive = trio.open_memory_channel[Any](100)

    def send(self, message: Any, payload: bytes = b"") -> None:
        if isinstance(message, OpenSession):
            self.gives(SessionOpened(message.session, 0))

    def gives(self, message: Any, payload: bytes = b"") -> None:
        self._send.send_nowait((message, payload))

    async def receive(self) -> list[Any]:
        return [await self._receive.receive()]


def scripted_session(
    flows: dict[str, ScriptedFlow], chains: Sequence[tuple[str, str]], conduct: ServerConduct
) -> RemoteSession:
    """Return a session that is routed over these chains of two, one after the other, then the last one again."""
    routes = iter(chains)

    async def open_flow(peer: str) -> ScriptedFlow:
        return flows[peer]

    def plan(kept: Any, avoids: str = "all", commit: Any = None, wire: Any = None, also: Any = ()) -> Any:
        if also:
            return None
        first, last = next(routes, chains[-1])
        return (Hop(first, 0, 3), Hop(last, 3, 6))

    servers: Any = SimpleNamespace(
        plan=plan,
        commits=tuple,
        plan_newest=lambda avoids, wire: (plan(()), None),
        conduct=conduct,
        proven=Counter[str](),
        computed=lambda route, pace: None,
        is_late=lambda route, pace: False,
        foretold_ms=lambda route: 0.0,
        measured=lambda peer, rtt_s: None,
        missing=lambda refusal, wire: "none",
    )
    server_flows: Any = SimpleNamespace(open=open_flow, add=lambda s: None, remove=lambda s: None)
    return RemoteSession(server_flows, servers, Sampling(), stops=(), model=MODEL)


async def known(peer: str) -> bool:
    return True


async def settled() -> None:
    await trio.testing.wait_all_tasks_blocked()


async def test_a_token_drawn_before_the_next_server_is_connected_is_sent_once_it_is() -> None:
    """The client believes that it was: the token names the newest revision."""
    connected, to_first, client = trio.Event(), ScriptedFlow("first"), ScriptedFlow("client")

    async def open_flow(peer: str) -> ScriptedFlow:
        await connected.wait()
        return to_first

    worker: Any = ScriptedWorker()
    host: Any = SimpleNamespace(peer_id="last", flows=SimpleNamespace(open=open_flow), events=None)
    async with trio.open_nursery() as nursery:
        server = BlockServer(worker, host, nursery, known)
        nursery.start_soon(server.run)
        flow: Any = client
        start = StartSession(SESSION, 1, 3, 6, "first", "first", Sampling(), known=5, allowed=50)
        await server.on_message(flow, start, memoryview(b""))
        await settled()
        assert not client.of(SessionStarted)
        worker.gives(SpanOutput(1, 4, 1, 77, 0.0, (), (9,)))
        await settled()
        assert [(t.position, t.token) for t in client.of(TokenDrawn)] == [(5, 77)]
        connected.set()
        await settled()
        assert client.of(SessionStarted)
        assert not to_first.of(PassTokens), "the first server may not have heard of the session yet"
        await server.on_message(flow, Allow(SESSION, 50, 5), memoryview(b""))
        assert to_first.of(PassTokens) == [PassTokens(SESSION, 5, (77,), True)]
        nursery.cancel_scope.cancel()


async def test_a_client_has_no_peer_dialled_that_is_no_server() -> None:
    dialled, client = list[str](), ScriptedFlow("client")

    async def open_flow(peer: str) -> ScriptedFlow:
        dialled.append(peer)
        return ScriptedFlow(peer)

    async def is_server(peer: str) -> bool:
        return peer == "first"

    worker: Any = ScriptedWorker()
    host: Any = SimpleNamespace(peer_id="last", flows=SimpleNamespace(open=open_flow), events=None)
    async with trio.open_nursery() as nursery:
        server = BlockServer(worker, host, nursery, is_server)
        nursery.start_soon(server.run)
        flow: Any = client
        for revision, target in enumerate(("third party", "first"), 1):
            start = StartSession(SESSION, revision, 3, 6, "first", target, Sampling(), known=5, allowed=50)
            await server.on_message(flow, start, memoryview(b""))
            await settled()
        nursery.cancel_scope.cancel()
    assert dialled == ["first"]
    assert [lost.revision for lost in client.of(NeighbourLost)] == [1]
    assert [started.revision for started in client.of(SessionStarted)] == [2]


async def test_a_token_that_comes_while_a_route_fails_is_kept() -> None:
    """The last server stays, and draws it only once."""
    flows = {peer: ScriptedFlow(peer) for peer in ("a", "b", "c", "last")}
    conduct = ServerConduct()
    session = scripted_session(flows, [("a", "last"), ("b", "last"), ("c", "last")], conduct)

    def answer(peer: str) -> Any:
        def hears(message: Any) -> None:
            flow: Any = flows[peer]
            if not isinstance(message, StartSession):
                return
            if peer == "last" and message.revision == 1:
                session.take(flow, TokenDrawn(session.id, 1, 2, 40))
            if peer == "last" and message.revision == 2:
                session.take(flow, TokenDrawn(session.id, 1, 3, 41))
                session.take(flow, NeighbourLost(session.id, 2, "b"))
                return
            session.take(flow, SessionStarted(session.id, message.revision, 0 if peer == "c" else 2))

        return hears

    for peer, flow in flows.items():
        flow.hears = answer(peer)
    answers = session.generate([7, 8], 10)
    with trio.fail_after(60):
        assert (await anext(answers)).token == 40
        flows["a"].is_open = False
        drawn = await anext(answers)
    assert (drawn.position, drawn.token) == (3, 41)
    assert conduct.without("all") == {"a", "b"} and [hop.peer for hop in session.route] == ["c", "last"]
    await answers.aclose()


async def test_what_was_lost_on_its_way_is_sent_again(autojump_clock: trio.testing.MockClock) -> None:
    """All servers answer and none has failed, but no token comes: the first one never got the last one's token, then
    the last one draws none."""
    flows = {peer: ScriptedFlow(peer) for peer in ("a", "last")}
    session, haves = scripted_session(flows, [("a", "last")], ServerConduct()), {"a": 0, "last": 0}

    def answer(peer: str) -> Any:
        flow: Any = flows[peer]

        def hears(message: Any) -> None:
            if isinstance(message, StartSession):
                session.take(flow, SessionStarted(session.id, message.revision, haves[peer]))
            elif isinstance(message, PassTokens):  # what the client sends comes out at the last server
                end = message.position + len(message.ids)
                haves.update(a=end, last=end)
                last: Any = flows["last"]
                session.take(last, TokenDrawn(session.id, session._revision, end, 40 + end))
            elif isinstance(message, Rewind):
                session.take(flow, TokenDrawn(session.id, session._revision, message.position + 1, 50))

        return hears

    for peer, flow in flows.items():
        flow.hears = answer(peer)
    answers = session.generate([7, 8], 10)
    assert (await anext(answers)).token == 42
    assert (await anext(answers)).token == 43  # the client sends the last server's token itself
    haves.update(a=4, last=4)
    assert (await anext(answers)).token == 50
    assert flows["last"].of(Rewind) == [Rewind(session.id, 3)]
    haves.update(a=5, last=4)
    with pytest.raises(NetworkError, match="no token came"):
        await anext(answers)
    assert [start.revision for start in flows["last"].of(StartSession)] == [1, 2, 3, 4], "wired again once before it"


async def test_what_waits_for_a_frozen_server_does_not_hold_up_its_successor() -> None:
    frozen, spare, client = ScriptedFlow("frozen"), ScriptedFlow("spare"), ScriptedFlow("client")
    frozen.frozen = True
    start = StartSession(SESSION, 1, 0, 3, "client", "frozen", Sampling(), known=5, allowed=50)
    flow: Any = client
    session = ServedSession(1, flow, start, UplinkRate())
    large = SentTokens(0, (1, 2), True, bytes(SMALL_BYTES + 2))
    async with trio.open_nursery() as nursery:
        for revision, target in ((1, frozen), (2, spare)):
            session.wire(flow, msgspec.structs.replace(start, revision=revision, target=target.peer))
            there: Any = target
            session.set_target(there)
            session.replay([large], nursery)
            session.send(SentTokens(2, (3,), True, b"12"), nursery)
            await settled()
        assert [message.position for message in spare.of(PassTokens)] == [0, 2] and not frozen.sent
        assert not client.sent
        nursery.cancel_scope.cancel()
