"""Typed calls between peers, with raw payloads, size limits and deadlines.

    store = Method("dht/store", StoreRequest, StoreReply, request_payload_max=1 << 20)
    host.rpc.register(store, handler)
    reply = await host.rpc.call(peer_id, store, StoreRequest(...), tensor_bytes, timeout_s=5)

One call is one stream, one request and one reply. The caller's deadline covers everything: dialling, opening the
stream, writing, waiting, reading.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

import msgspec
import trio

from peer import faults
from peer.decoding import MALFORMED, told
from peer.errors import (
    BarnraiseError,
    ConnectionLost,
    DeadlineExceeded,
    DialError,
    NetworkError,
    NotAdmitted,
    ProtocolViolation,
    RemoteError,
    TooLarge,
)
from peer.events import EventLog
from peer.identity import is_peer_id
from peer.net.address_prefix import prefix_of
from peer.net.admissions import Admissions
from peer.net.limits import NetLimits
from peer.net.method import Call, Check, Empty, Handler, Method, Rep, Reply, Req
from peer.net.rate_limit import Meter
from peer.net.rpc_server import CODE_MAX, MESSAGE_MAX, RpcServer, flat
from peer.net.wire import SMALL_BYTES, Buffer, Channel, Frames, ReplyHeader, RequestHeader
from peer.plain_text import cut

__all__ = ["Buffer", "Call", "Empty", "Handler", "Method", "Reply", "Rpc"]

_EARLY_REPLY_BYTES: Final = 4 * SMALL_BYTES  # bigger requests watch for a refusal while they are being sent


class ChannelSource(Protocol):
    """The source of channels: the host's connections."""

    async def open(self, peer: str, bulk: bool) -> Channel:
        """Open a new channel to `peer`, dialling if need be. Raises DialError or ConnectionLost."""

    def remote_ip(self, peer: str) -> str | None:
        """Return the IP address at which a peer is seen, None if it is not connected or only through a relay."""


@dataclass(eq=False)
class _Introduction:
    """An introduction under way."""

    over: trio.Event = field(default_factory=trio.Event)
    failure: BarnraiseError | None = None


class Rpc:
    """Answers calls of other peers and makes calls to them."""

    def __init__(
        self,
        peer_id: str,
        channels: ChannelSource,
        limits: NetLimits,
        meter: Meter,
        events: EventLog,
        admissions: Admissions | None = None,
    ) -> None:
        self._peer_id = peer_id
        self._channels = channels
        self._limits = limits
        self._meter = meter
        self.admissions: Final = Admissions() if admissions is None else admissions
        self.server: Final = RpcServer(limits, meter, events, self.admissions)
        self._slots: dict[str, trio.CapacityLimiter] = {}
        self.introduce: Callable[[str, float], Awaitable[None]] | None = None
        """Called with (peer, seconds left) to prove to each other what both are. Raises if either is not admitted."""
        self._introductions: dict[str, _Introduction] = {}

    def register(self, method: Method[Req, Rep], handler: Handler[Req, Rep], check: Check[Req] | None = None) -> None:
        """Answer calls of `method` with `handler` from now on, those that `check` does not refuse."""
        self.server.add(method, handler, check)

    def prefix(self, peer: str) -> str:
        """Return the address prefix at which a peer is seen."""
        return prefix_of(self._channels.remote_ip(peer))

    def counts(self) -> dict[str, int]:
        """Return the calls under way, those that wait for their turn too."""
        slots = self._slots.values()
        ours = sum(each.borrowed_tokens + each.statistics().tasks_waiting for each in slots)
        return {"calls_in": self.server.calls.total(), "calls_out": int(ours)}

    def scope(self) -> AbstractContextManager[None]:
        """Withdraw at the end of the block the methods that were registered in it.

        Their running handlers are cancelled, and callers get RemoteError (code UnknownMethod).
        """
        return self.server.scope()

    async def call(
        self,
        peer: str,
        method: Method[Req, Rep],
        body: Req,
        payload: Buffer = b"",
        *,
        timeout_s: float,
        bulk: bool = False,
    ) -> Reply[Rep]:
        """Call `method` at `peer` and wait for the answer, `timeout_s` seconds at most.

        `bulk` sends over a connection for payloads, so that big payloads never delay control calls.

        Raises DialError, ConnectionLost, DeadlineExceeded, RemoteError (what the handler raised), TooLarge (`body`) or
        ProtocolViolation (a bad reply).
        """
        view = flat(payload)
        if view.nbytes > method.request_payload_max:
            raise ValueError(f"{method.name} takes {method.request_payload_max} bytes, not {view.nbytes}")
        if faults.reach(f"{faults.CALL}{method.name}") == "garble":
            view = memoryview(b"\xff" * view.nbytes)
        deadline = trio.current_time() + timeout_s
        with trio.move_on_at(deadline):
            if peer == self._peer_id:
                return await self._call_self(method, body, view)

            await self._ensure_admitted(peer, method, deadline)
            try:
                return await self._call_peer(peer, method, body, view, bulk, deadline)
            except RemoteError as error:
                if error.code != NotAdmitted.__name__ or method.access == "open" or self.introduce is None:
                    raise
            self.admissions.revoke(peer)  # it has forgotten us
            await self._ensure_admitted(peer, method, deadline)
            return await self._call_peer(peer, method, body, view, bulk, deadline)
        raise DeadlineExceeded(f"{peer} did not answer {method.name} within {timeout_s:g} s")

    async def _ensure_admitted(self, peer: str, method: Method[Any, Any], deadline: float) -> None:
        """Raise unless `peer` has proved on this connection that it may be called so: nothing is sent to it before.

        Calls that wait for the same introduction share its failure. Raises ProtocolViolation, or what `introduce`
        raises.
        """
        if self.admissions.allows(peer, method.access):
            return
        introduction = self._introductions.get(peer)
        if introduction is not None:
            await introduction.over.wait()
            if introduction.failure is None:  # it succeeded, or its caller's time was over
                await self._ensure_admitted(peer, method, deadline)
                return
            if isinstance(introduction.failure, RemoteError):
                raise RemoteError(introduction.failure.code, introduction.failure.message)
            if isinstance(introduction.failure, NetworkError):  # a peer that is not reached has broken no rule
                raise ConnectionLost(str(introduction.failure))
        elif self.introduce is not None:
            await self._introduce(peer, deadline)
        if not self.admissions.allows(peer, method.access):
            raise ProtocolViolation(
                f"{peer} has not proved that it belongs to this run, so {method.name} is not sent to it"
            )

    async def introduce_again(self, peer: str, timeout_s: float) -> None:
        """Prove once more to a peer what this one is, before its rights there end. Raises what `introduce` raises."""
        if (introduction := self._introductions.get(peer)) is not None:
            await introduction.over.wait()
        elif self.introduce is not None:
            await self._introduce(peer, trio.current_time() + timeout_s)

    async def _introduce(self, peer: str, deadline: float) -> None:
        assert self.introduce is not None
        introduction = self._introductions[peer] = _Introduction()
        try:
            await self.introduce(peer, deadline - trio.current_time())
        except BarnraiseError as error:
            introduction.failure = error
            if isinstance(error, ProtocolViolation):
                self.server.penalize(peer, str(error))
            raise
        finally:
            del self._introductions[peer]
            introduction.over.set()

    async def _call_peer(
        self, peer: str, method: Method[Req, Rep], body: Req, payload: memoryview, bulk: bool, deadline: float
    ) -> Reply[Rep]:
        if not is_peer_id(peer):  # from a forged head or record
            raise DialError(f"{peer!r} is no peer id", "unreachable")
        if method.urgent:
            return await self._exchange(await self._channels.open(peer, bulk), method, body, payload, deadline)
        slots = self._slots.get(peer)
        if slots is None:
            slots = self._slots[peer] = trio.CapacityLimiter(self._limits.calls_out_per_peer)
        borrower = object()
        try:
            slots.acquire_on_behalf_of_nowait(borrower)
        except trio.WouldBlock:
            await slots.acquire_on_behalf_of(borrower)
        try:
            return await self._exchange(await self._channels.open(peer, bulk), method, body, payload, deadline)
        finally:
            slots.release_on_behalf_of(borrower)
            if not slots.borrowed_tokens and not slots.statistics().tasks_waiting:
                self._slots.pop(peer, None)

    async def _call_self(self, method: Method[Req, Rep], body: Req, payload: memoryview) -> Reply[Rep]:
        outcome = await self.server.run_local(method, Call(self._peer_id, body, payload))
        if outcome.code:
            raise RemoteError(outcome.code, outcome.message)
        assert isinstance(outcome.body, method.reply)
        return Reply(outcome.body, outcome.payload)

    async def _exchange(
        self, channel: Channel, method: Method[Req, Rep], body: Req, payload: memoryview, deadline: float
    ) -> Reply[Rep]:
        in_order = False
        try:
            frames = Frames(channel, self._meter, method.header_bytes)
            left_ms = int(1000 * (deadline - trio.current_time())) + 1
            encoded = msgspec.Raw(msgspec.msgpack.encode(body))
            request = RequestHeader(method.name, payload.nbytes, left_ms, encoded)
            header, sent_all = await _request(frames, request, payload)
            if header.code:
                message = cut(header.message, MESSAGE_MAX)
                raise RemoteError(cut(header.code, CODE_MAX), message)  # and abandon: it may not have read all
            if header.payload_bytes > method.reply_payload_max:
                raise ProtocolViolation(
                    f"{channel.peer} answered {method.name} with {header.payload_bytes} bytes,"
                    f" over the limit of {method.reply_payload_max}"
                )
            try:
                answer = msgspec.msgpack.decode(header.body, type=method.reply)
            except MALFORMED as error:
                raise ProtocolViolation(f"{channel.peer} answered {method.name} with garbage: {told(error)}") from error
            reply = Reply(answer, await frames.receive_payload(header.payload_bytes))
            in_order = sent_all
            return reply
        except ProtocolViolation as error:
            self.server.penalize(channel.peer, str(error))
            raise
        finally:
            if in_order:
                channel.finish()
            else:
                channel.abandon()


async def ask_each(
    rpc: Rpc,
    method: Method[Req, Rep],
    bodies: Mapping[str, Req],
    timeout_s: float,
    failed: Callable[[str, BarnraiseError], None] = lambda peer, error: None,
) -> dict[str, Rep]:
    """Call `method` at all peers of `bodies` at once, and return the answers that came in time, by peer. `failed` gets
    the errors of the others."""
    answers = dict[str, Rep]()

    async def ask(peer: str, body: Req) -> None:
        try:
            answers[peer] = (await rpc.call(peer, method, body, timeout_s=timeout_s)).body
        except BarnraiseError as error:
            failed(peer, error)

    async with trio.open_nursery() as nursery:
        for peer, body in bodies.items():
            nursery.start_soon(ask, peer, body)
    return answers


async def _request(frames: Frames, header: RequestHeader, payload: memoryview) -> tuple[ReplyHeader, bool]:
    """Send a request and read the reply's header. Returns also whether the request was sent to its end.

    A peer may refuse a big payload before it has read it, so the reply is awaited while the payload is sent. A reply
    that is no refusal means that the peer has read all of it, even if our sending task has not ended yet.
    """
    if payload.nbytes <= _EARLY_REPLY_BYTES:
        await frames.send(header, payload)
        return await frames.receive_header(ReplyHeader), True
    reply: ReplyHeader | None = None
    failure: ConnectionLost | ProtocolViolation | TooLarge | None = None
    sent_all = False
    async with trio.open_nursery() as nursery:

        async def send() -> None:
            nonlocal failure, sent_all
            try:
                await frames.send(header, payload)
                sent_all = True
            except (ConnectionLost, TooLarge) as error:
                failure = error
                nursery.cancel_scope.cancel()

        nursery.start_soon(send)
        try:
            reply = await frames.receive_header(ReplyHeader)
        except (ConnectionLost, ProtocolViolation) as error:
            failure = error
        if reply is None or reply.code:
            nursery.cancel_scope.cancel()
    if reply is None:
        assert failure is not None
        raise failure
    return reply, sent_all
