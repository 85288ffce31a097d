"""The bulk lane: big payloads between directly reachable peers over plain TLS 1.3, past the cost of Noise and Yamux.

It trusts nothing of its own. Over the authenticated libp2p connection the caller asks for an offer: a port, the hash of
the listener's certificate, and a token that opens one connection. The caller checks the hash before it sends the token,
the listener takes the token for the peer it gave it to, so both sides know whom they talk to. Frames, limits and
deadlines are those of any call. Where the lane cannot be reached (NAT, firewall, a relayed peer) calls silently take
libp2p streams.
"""

from __future__ import annotations

import secrets
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from typing import Final

import msgspec
import trio

from peer.cooldown import Cooldown
from peer.errors import BarnraiseError, ConnectionLost
from peer.libp2p_fixes.sockets import set_keepalive
from peer.method import Call, Method
from peer.tls import Credentials, TlsSocket, client_context
from peer.turns import Turns
from peer.wire import Buffer, Channel

_TOKEN_BYTES: Final = 32
_TOKEN_S: Final = 20.0
_TOKENS_PER_PEER: Final = 16
_HANDSHAKE_S: Final = 5.0
_DIAL_S: Final = 3.0
_HANDSHAKES_MAX: Final = 32
_CONNECTIONS_PER_PEER: Final = 16
_CONNECTIONS_MAX: Final = 512
_POOL_PER_PEER: Final = 4
_IDLE_S: Final = 60.0
_SERVER_IDLE_S: Final = 2 * _IDLE_S  # the caller closes first, so that it never picks a connection we are closing
_RETRY_S: Final = 30.0
_MOVED_BYTES: Final = 256 << 10

Ask = Callable[[str], Awaitable["Offer"]]
Serve = Callable[[Channel], Awaitable[bool]]


class OfferRequest(msgspec.Struct, frozen=True):
    """Asks for one connection to the lane."""


class Offer(msgspec.Struct, frozen=True):
    """Where and as whom the lane listens (port 0: not at all), and a token for one connection."""

    port: int
    fingerprint: bytes
    token: bytes


OFFER: Final = Method("net/lane", OfferRequest, Offer, open=True, urgent=True)


class LaneChannel(Channel):
    """One call over a lane connection; a finished one goes back to `done`."""

    bulk = True

    def __init__(
        self, peer: str, tls: TlsSocket, turns: Turns, done: Callable[[TlsSocket], None], ahead: bytes = b""
    ) -> None:
        self.peer = peer
        self._tls = tls
        self._turns = turns
        self._done = done
        self._ahead = ahead
        self._is_our_turn = False

    async def send(self, data: Buffer) -> None:
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _MOVED_BYTES):
            await self._tls.send(view[start : start + _MOVED_BYTES])
            if self._is_our_turn:
                self._turns.moved()

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        async with self._turns.turn() as self._is_our_turn:
            try:
                yield
            finally:
                self._is_our_turn = False

    async def receive(self, max_bytes: int) -> Buffer:
        if self._ahead:
            ahead, self._ahead = self._ahead[:max_bytes], self._ahead[max_bytes:]
            return ahead
        buffer = memoryview(bytearray(max_bytes))
        return buffer[: await self._tls.receive_into(buffer)]

    async def receive_into(self, view: memoryview) -> int:
        if not self._ahead:
            return await self._tls.receive_into(view, expected=len(view))
        data = await self.receive(len(view))
        view[: len(data)] = data
        return len(data)

    def finish(self) -> None:
        self._done(self._tls)

    def abandon(self) -> None:
        self._tls.close()
        self._done(self._tls)


class BulkLane:
    """The listener of one host and its pooled connections to others'."""

    def __init__(self, nursery: trio.Nursery, ask: Ask, serve: Serve) -> None:
        self._nursery = nursery
        self._ask = ask
        self._serve = serve
        self._credentials = Credentials.generate()
        self._client = client_context()
        self._port = 0
        self._tokens: dict[bytes, tuple[str, float]] = {}
        self._handshakes = 0
        self._open: defaultdict[str, set[TlsSocket]] = defaultdict(set)
        self._idle: defaultdict[str, list[tuple[TlsSocket, float]]] = defaultdict(list)
        self._dialling: Counter[str] = Counter()
        self._dialled: set[TlsSocket] = set()
        self._turns: defaultdict[str, Turns] = defaultdict(Turns)
        self._failed = Cooldown(_RETRY_S)

    async def listen(self, ip: str, port: int) -> None:
        """Accept lane connections at `ip`; port 0 takes any free one. OSError if the port is taken."""
        listeners = await trio.open_tcp_listeners(port, host=ip)
        self._port = listeners[0].socket.getsockname()[1]
        self._nursery.start_soon(trio.serve_listeners, self._accept, listeners)

    async def offer(self, call: Call[OfferRequest]) -> Offer:
        """Answers `OFFER`."""
        now = trio.current_time()
        self._tokens = {token: (peer, until) for token, (peer, until) in self._tokens.items() if until > now}
        mine = sum(peer == call.peer for peer, _ in self._tokens.values())
        if not self._port or mine >= _TOKENS_PER_PEER:
            return Offer(0, b"", b"")
        token = secrets.token_bytes(_TOKEN_BYTES)
        self._tokens[token] = (call.peer, now + _TOKEN_S)
        return Offer(self._port, self._credentials.fingerprint, token)

    async def channel(self, peer: str, ip: str) -> Channel | None:
        """A channel to `peer`, which has the address `ip`; None where the lane is not to be had."""
        idle = self._idle[peer]
        while idle:
            tls, _ = idle.pop()
            if tls.is_idle():
                return self._channel(peer, tls)
            self._forget(peer, tls)
        ours = len(self._open.get(peer, set()) & self._dialled) + self._dialling[peer]
        if peer in self._failed or ours >= _CONNECTIONS_PER_PEER:
            return None
        self._dialling[peer] += 1
        try:
            tls = await self._dial(peer, ip)
        except (OSError, BarnraiseError):
            self._failed.begin(peer)
            return None
        finally:
            self._dialling[peer] -= 1
            if not self._dialling[peer]:
                del self._dialling[peer]
        return self._channel(peer, tls)

    def abort(self, peer: str) -> None:
        """Drop every connection with a peer that no longer answers, and try the lane afresh when it is back."""
        for tls in self._open.pop(peer, set()):
            tls.close()
            self._dialled.discard(tls)
        self._idle.pop(peer, None)
        self._turns.pop(peer, None)
        self._failed.end(peer)

    def forget_idle(self, peer: str) -> None:
        """Close the pooled connections with a peer that has gone; one with a call on it ends by itself."""
        for tls, _ in self._idle.pop(peer, []):
            self._forget(peer, tls)

    def close(self) -> None:
        for peer in list(self._open):
            self.abort(peer)

    async def run(self) -> None:
        """Close connections that nobody has used for a while, until cancelled."""
        while True:
            await trio.sleep(_IDLE_S / 4)
            oldest = trio.current_time() - _IDLE_S
            for peer, idle in list(self._idle.items()):
                for tls, since in idle:
                    if since < oldest:
                        self._forget(peer, tls)
                self._idle[peer] = [(tls, since) for tls, since in idle if since >= oldest]
                if not self._idle[peer]:
                    del self._idle[peer]

    async def _dial(self, peer: str, ip: str) -> TlsSocket:
        with trio.move_on_after(_DIAL_S):
            offer = await self._ask(peer)
            if not offer.port:
                raise ConnectionLost(f"{peer} has no bulk lane.")
            stream = await trio.open_tcp_stream(ip, offer.port)
            set_keepalive(stream)
            tls = TlsSocket(stream, self._client, server_side=False)
            try:
                await tls.handshake()
                if not secrets.compare_digest(tls.peer_fingerprint, offer.fingerprint):
                    raise ConnectionLost(f"somebody else answers for {peer} at {ip} port {offer.port}.")
                await tls.send(offer.token)
            except BaseException:
                tls.close()
                raise
            self._open[peer].add(tls)
            self._dialled.add(tls)
            return tls
        raise ConnectionLost(f"the bulk lane of {peer} did not answer within {_DIAL_S:g} s.")

    async def _accept(self, stream: trio.SocketStream) -> None:
        if self._handshakes >= _HANDSHAKES_MAX:
            stream.socket.close()
            return
        try:
            set_keepalive(stream)
            with closing(TlsSocket(stream, self._credentials.context, server_side=True)) as tls:
                peer = await self._authenticate(tls)
                if peer is not None:
                    self._open[peer].add(tls)
                    try:
                        await self._answer_calls(peer, tls)
                    finally:
                        self._forget(peer, tls)
        except OSError:  # gone before we looked at it
            return

    async def _authenticate(self, tls: TlsSocket) -> str | None:
        """The peer whose token comes first on this connection, or None."""
        token = memoryview(bytearray(_TOKEN_BYTES))
        got = 0
        self._handshakes += 1
        try:
            with trio.move_on_after(_HANDSHAKE_S):
                await tls.handshake()
                while got < _TOKEN_BYTES:
                    got += await tls.receive_into(token[got:])
        except ConnectionLost:
            return None
        finally:
            self._handshakes -= 1
        peer, until = self._tokens.pop(bytes(token), ("", 0.0))
        known = got == _TOKEN_BYTES and trio.current_time() < until
        everybodys = sum(len(connections) for connections in self._open.values())
        theirs = len(self._open.get(peer, set()) - self._dialled)
        crowded = theirs >= _CONNECTIONS_PER_PEER or everybodys >= _CONNECTIONS_MAX
        return peer if known and not crowded else None

    async def _answer_calls(self, peer: str, tls: TlsSocket) -> None:
        """One call after another until the caller goes away or breaks off."""
        first = memoryview(bytearray(1 << 16))
        while True:
            count = 0
            with trio.move_on_after(_SERVER_IDLE_S):
                try:
                    count = await tls.receive_into(first)
                except ConnectionLost:
                    return
            channel = LaneChannel(peer, tls, self._turns[peer], lambda _: None, bytes(first[:count]))
            if not count or not await self._serve(channel):
                return

    def _channel(self, peer: str, tls: TlsSocket) -> LaneChannel:
        return LaneChannel(peer, tls, self._turns[peer], lambda tls: self._release(peer, tls))

    def _release(self, peer: str, tls: TlsSocket) -> None:
        if tls in self._open.get(peer, ()) and tls.is_idle() and len(self._idle[peer]) < _POOL_PER_PEER:
            self._idle[peer].append((tls, trio.current_time()))
        else:
            self._forget(peer, tls)

    def _forget(self, peer: str, tls: TlsSocket) -> None:
        tls.close()
        self._dialled.discard(tls)
        known = self._open.get(peer)
        if known is not None:
            known.discard(tls)
            if not known:
                del self._open[peer]
                self._turns.pop(peer, None)
