"""The inbound half of rpc: checks a request step by step, runs its handler, answers.

Nothing that a peer sends ends our process: a violation costs it a `peer_penalized` event and a reset stream. A handler
runs under its caller's deadline and is cancelled when the caller goes away.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import trio

from peer import faults
from peer.catalogue.machine import Bug
from peer.decoding import MALFORMED, told
from peer.errors import BarnraiseError, ConnectionLost, NotAdmitted, ProtocolViolation, TooLarge
from peer.events import EventLog, PenaltyLog
from peer.net.admissions import Admissions
from peer.net.limits import RATE_FLOOR, REPLY_GRACE_S, ByteBudget, NetLimits
from peer.net.method import Call, Check, Handler, Method
from peer.net.rate_limit import Meter
from peer.net.wire import HEADER_BYTES, LARGE_HEADER_BYTES, Buffer, Channel, Frames, ReplyHeader, RequestHeader
from peer.plain_text import cut

INTERNAL: Final = "internal"
UNKNOWN_METHOD: Final = "UnknownMethod"
BUSY: Final = "Busy"
_TRY_AGAIN: Final = "try again in a moment"
_REFUSAL_S: Final = 5.0
_REFUSALS_MAX: Final = 256
CODE_MAX: Final = 64  # characters of an error's class name, where it leaves and where it comes in
MESSAGE_MAX: Final = 500
_HEADER_SLACK: Final = 1024  # for what a header holds beside its body
_NOTHING: Final = memoryview(b"")
_TRACE_LINES: Final = 20
_NO_BODY: Final = msgspec.Raw(b"\xc0")


@dataclass(frozen=True)
class Outcome:
    """The result of a handler: an error code and message, or a body and payload."""

    code: str
    message: str
    body: msgspec.Struct | None
    payload: memoryview


_CROWDED: Final = Outcome(BUSY, f"too many replies at once: {_TRY_AGAIN}", None, _NOTHING)


class _Refused(Exception):
    """The reason why a request is answered with an error before it is read to its end."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


@dataclass(eq=False)
class RegisteredMethod:
    """A method and its handler."""

    method: Method[Any, Any]
    handler: Handler[Any, Any]
    check: Check[Any] | None = None
    """Whether it wants a payload, before one byte of it is read."""
    running: set[trio.CancelScope] = field(default_factory=set)
    """The scopes of its running handlers."""
    withdrawn: bool = False

    def withdraw(self) -> None:
        self.withdrawn = True
        for running in tuple(self.running):
            running.cancel()


class RpcServer:
    """The methods registered at this host, and the bounds of calls to them."""

    def __init__(self, limits: NetLimits, meter: Meter, events: EventLog, admissions: Admissions) -> None:
        self._admissions = admissions
        self._limits = limits
        self._meter = meter
        self._events = events
        self._penalties = PenaltyLog(events, admissions.is_trusted)
        self._methods: dict[str, RegisteredMethod] = {}
        self.calls: Final[Counter[str]] = Counter()
        """The calls that each peer has open to us."""
        self._refusals = 0
        self._budget = ByteBudget(limits.payload_bytes_in_flight, admissions)
        self._stranger_headers = ByteBudget(limits.stranger_header_bytes)
        self._stranger_replies = ByteBudget(limits.stranger_reply_bytes)

    def add(self, method: Method[Any, Any], handler: Handler[Any, Any], check: Check[Any] | None = None) -> None:
        """Answer calls of `method` with `handler`, those that `check` does not refuse."""
        if method.name in self._methods:
            raise ValueError(f"{method.name} is registered already")
        self._methods[method.name] = RegisteredMethod(method, handler, check)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Withdraw at the end of the block the methods that were registered in it, and cancel their handlers."""
        before = set(self._methods)
        try:
            yield
        finally:
            for name in self._methods.keys() - before:
                self._methods.pop(name).withdraw()

    def penalize(self, peer: str, reason: str) -> None:
        """Record that `peer` broke the protocol."""
        self._penalties.note(peer, reason)

    async def serve(self, channel: Channel) -> bool:
        """Answer one call on `channel`. Returns whether the channel ended in order (and was finished)."""
        peer = channel.peer
        frames = Frames(channel, self._meter)
        answered = False
        try:
            if self._too_many(peer):
                raise _Refused(BUSY, f"too many calls at once: {_TRY_AGAIN}")
            self.calls[peer] += 1
            try:
                answered = await self._read_and_answer(peer, frames)
            finally:
                self.calls[peer] -= 1
                if not self.calls[peer]:
                    del self.calls[peer]
        except _Refused as refused:
            await self._refuse(frames, refused)
        except ProtocolViolation as error:
            self.penalize(peer, str(error))
        except ConnectionLost:
            pass
        if answered:
            channel.finish()
        else:
            channel.abandon()
        return answered

    def _too_many(self, peer: str) -> bool:
        """Whether a peer has more calls open than it may, or all peers together have. Strangers give way to members."""
        limits, admissions = self._limits, self._admissions
        if admissions.allows(peer, "member"):
            mine = limits.calls_in_per_peer
        else:
            mine = limits.calls_in_per_client if admissions.allows(peer, "client") else limits.calls_in_per_stranger
        kept = limits.calls_in_total // 4 if admissions.guarded and not admissions.is_trusted(peer) else 0
        return self.calls[peer] >= mine or self.calls.total() >= limits.calls_in_total - kept

    async def _read_and_answer(self, peer: str, frames: Frames) -> bool:
        """Read a request's header, then answer. Returns whether the answer was sent.

        Before caller and method are known a header has at most `HEADER_BYTES`. A larger one is read only from an
        admitted peer, for a method that declares it, and takes memory of a budget until the call ends.
        """
        deadline = trio.current_time() + self._limits.header_timeout_s
        name, header = "", None
        with trio.move_on_at(deadline):
            size = await frames.header_bytes()
            if HEADER_BYTES < size <= LARGE_HEADER_BYTES:
                name = await frames.method_ahead()
            else:
                header = await frames.receive_header(RequestHeader)
        if header is not None:
            return await self._answer(peer, frames, header)
        if not name:
            return False
        async with self._large_header(peer, frames, name, size):
            with trio.move_on_at(deadline) as timeout:
                header = await frames.receive_header(RequestHeader)
            return False if timeout.cancelled_caught else await self._answer(peer, frames, header)

    @asynccontextmanager
    async def _large_header(self, peer: str, frames: Frames, name: str, size: int) -> AsyncIterator[None]:
        method = self._served(peer, name).method
        if not self._admissions.allows(peer, "client"):
            raise _Refused(NotAdmitted.__name__, f"{name} with a large header is for peers that are admitted")
        if size > method.header_bytes:
            raise ProtocolViolation(f"{name} with a header of {size} bytes, over the limit of {method.header_bytes}")
        trusted = self._admissions.is_trusted(peer)
        budget = self._budget if trusted else self._stranger_headers
        if not trusted and not budget.fits(peer, size):  # it does not wait: what it has sent already is memory, too
            raise _Refused(BUSY, f"too many large requests at once: {_TRY_AGAIN}")
        async with budget.claim(peer, size) as claim:
            claim.advance(size)  # the time for a header is short anyway
            frames.header_max_bytes = method.header_bytes
            yield

    def _served(self, peer: str, name: str) -> RegisteredMethod:
        """Return a method that the peer may call, or raise _Refused."""
        if name not in self._methods:  # no violation: we may just be starting
            raise _Refused(UNKNOWN_METHOD, f"this peer does not serve {name[:64]}")
        served = self._methods[name]
        try:
            self._admissions.check(peer, name, served.method.access)
        except NotAdmitted as error:
            raise _Refused(type(error).__name__, str(error)) from error
        return served

    async def _answer(self, peer: str, frames: Frames, header: RequestHeader) -> bool:
        limit = self._methods[header.method].method.request_payload_max if header.method in self._methods else None
        if limit is not None and header.payload_bytes > limit:
            raise ProtocolViolation(f"{header.method} with {header.payload_bytes} bytes, over the limit of {limit}")
        served = self._served(peer, header.method)
        method = served.method
        body = _decode(header.body, method.request, method.name)
        frames.header_max_bytes = method.header_bytes
        answered = False
        left_s = max(0.0, header.timeout_ms / 1e3)  # a caller whose loop lags may be late already
        with trio.move_on_after(min(left_s, self._limits.call_timeout_s)):
            await self._check(served, peer, body, header.payload_bytes)
            is_free = method.access == "member" or method.replies_bounded or self._admissions.is_trusted(peer)
            answer = self._answer_freely if is_free else self._answer_stranger
            answered = await answer(peer, frames, served, body, header.payload_bytes)
        return answered

    async def _check(self, served: RegisteredMethod, peer: str, body: Any, size_bytes: int) -> None:
        """Ask the method's check about a payload. Raises _Refused."""
        if served.check is None:
            return
        outcome = await self._handled(served.method, peer, served.check(peer, body, size_bytes))
        if isinstance(outcome, Outcome):
            raise _Refused(outcome.code, outcome.message)

    async def _receive_and_run(
        self, peer: str, frames: Frames, served: RegisteredMethod, body: Any, size_bytes: int
    ) -> Outcome | None:
        """Take memory for a payload, receive it and run the handler. Returns None if the caller went away."""
        if not size_bytes:
            return await self._run_watched(frames, served, Call(peer, body, _NOTHING))
        if self._budget.crowded(peer):
            raise _Refused(BUSY, f"too many payloads wait for memory: {_TRY_AGAIN}")
        async with self._budget.claim(peer, size_bytes, own_rate=self._meter.download.rate) as claim:
            payload = await frames.receive_payload(size_bytes, self._limits.payload_idle_s, claim.advance)
            return await self._run_watched(frames, served, Call(peer, body, payload))

    async def _answer_stranger(
        self, peer: str, frames: Frames, served: RegisteredMethod, body: Any, size_bytes: int
    ) -> bool:
        """Run a method that is not for members only, for an untrusted peer. The largest payload of its reply takes
        memory before the handler runs: many handlers may run before the first reply leaves."""
        method, budget = served.method, self._stranger_replies
        if method.reply_payload_max and budget.crowded(peer):
            raise _Refused(_CROWDED.code, _CROWDED.message)
        async with budget.claim(peer, method.reply_payload_max, is_reply=True) as claim:
            outcome = await self._receive_and_run(peer, frames, served, body, size_bytes)
            if outcome is None:
                return False
            header = _reply_header(method, outcome)
            size = outcome.payload.nbytes
            budget.shrink(claim, size)
            large = len(header.body) if len(header.body) > HEADER_BYTES else 0
            if large and not budget.fits(peer, large):  # it does not wait, since it holds memory already
                header, outcome, large = _reply_header(method, _CROWDED), _CROWDED, 0
            async with budget.claim(peer, large):
                with trio.move_on_after(REPLY_GRACE_S + (size + large) / RATE_FLOOR) as timeout:
                    await frames.send(header, outcome.payload, claim.advance)
        return not timeout.cancelled_caught

    async def _answer_freely(
        self, peer: str, frames: Frames, served: RegisteredMethod, body: Any, size_bytes: int
    ) -> bool:
        """Run a method for a member, or one that bounds its replies itself. A large answer takes memory until it has
        left. The request's payload has given its own back by then: no call waits for memory while it holds some."""
        outcome = await self._receive_and_run(peer, frames, served, body, size_bytes)
        if outcome is None:
            return False
        header = _reply_header(served.method, outcome)
        size = len(header.body) + outcome.payload.nbytes
        if size <= HEADER_BYTES:
            await frames.send(header, outcome.payload)
            return True
        async with self._budget.claim(peer, size, is_reply=True, own_rate=self._meter.upload.rate) as claim:
            await frames.send(header, outcome.payload, claim.advance)
        return True

    async def _run_watched(self, frames: Frames, served: RegisteredMethod, call: Call[Any]) -> Outcome | None:
        """Return the handler's outcome, or None if the caller went away first, which cancels the handler."""
        outcomes: list[Outcome] = []
        violations: list[ProtocolViolation] = []
        async with trio.open_nursery() as nursery:

            async def watch() -> None:
                try:
                    await frames.ended()
                except ProtocolViolation as error:
                    violations.append(error)
                nursery.cancel_scope.cancel()

            nursery.start_soon(watch)
            outcomes.append(await self.run(served, call))
            nursery.cancel_scope.cancel()
        for violation in violations:
            raise violation
        return outcomes[0] if outcomes else None

    async def run_local(self, method: Method[Any, Any], call: Call[Any]) -> Outcome:
        """Run a call to ourselves: no gate, no frames."""
        if method.name not in self._methods:
            return Outcome(UNKNOWN_METHOD, f"this peer does not serve {method.name}", None, _NOTHING)
        return await self.run(self._methods[method.name], call)

    async def run(self, served: RegisteredMethod, call: Call[Any]) -> Outcome:
        """Run a handler, unless its method is withdrawn meanwhile."""
        method = served.method
        outcome = Outcome(UNKNOWN_METHOD, f"this peer serves {method.name} no longer", None, _NOTHING)
        if served.withdrawn:  # while its payload arrived
            return outcome
        with trio.CancelScope() as scope:
            served.running.add(scope)
            try:
                outcome = await _as_scripted(method, await self._handle(method, served.handler, call))
            finally:
                served.running.discard(scope)
        return outcome

    async def _handle(self, method: Method[Any, Any], handler: Handler[Any, Any], call: Call[Any]) -> Outcome:
        """Return what the handler answers or raises as an outcome."""
        answer = await self._handled(method, call.peer, handler(call))
        if isinstance(answer, Outcome):
            return answer
        body, payload = answer if isinstance(answer, tuple) else (answer, b"")
        view = flat(payload)
        if view.nbytes > method.reply_payload_max or not isinstance(body, method.reply):
            return self._bug(method, f"answered with {type(body).__name__} and {view.nbytes} bytes", "")
        return Outcome("", "", body, view)

    async def _handled(self, method: Method[Any, Any], peer: str, work: Awaitable[Any]) -> Any:
        """Return what a handler or check returns; what it raises, as an outcome. This is the rpc edge."""
        try:
            return await work
        except ProtocolViolation as error:
            self.penalize(peer, f"{method.name}: {error}")
            return Outcome(type(error).__name__, str(error), None, _NOTHING)
        except BarnraiseError as error:
            return Outcome(type(error).__name__, str(error), None, _NOTHING)
        except Exception as error:  # noqa: BLE001 - the rpc edge: our bug is the caller's error and our event
            return self._bug(method, repr(error), traceback.format_exc())

    def _bug(self, method: Method[Any, Any], error: str, trace: str) -> Outcome:
        self._events.emit(Bug(where=method.name, error=error, trace=tuple(trace.splitlines()[-_TRACE_LINES:])))
        return Outcome(INTERNAL, f"a bug in {method.name}; that peer's events have the details", None, _NOTHING)

    async def _refuse(self, frames: Frames, refused: _Refused) -> None:
        """Answer before the request is read: the caller stops sending when it sees the reply.

        Refused calls are no open calls, so that they keep no other peer out. Of very many, most are left unanswered.
        """
        if self._refusals >= _REFUSALS_MAX:
            return
        self._refusals += 1
        try:
            with trio.move_on_after(self._limits.header_timeout_s) as timeout, suppress(ConnectionLost):
                await frames.send(ReplyHeader(refused.code, refused.message, 0, _NO_BODY), _NOTHING)
                timeout.deadline = trio.current_time() + _REFUSAL_S
                await frames.discard()
        finally:
            self._refusals -= 1


async def _as_scripted(method: Method[Any, Any], outcome: Outcome) -> Outcome:
    """Return the answer, changed as a scripted fault says."""
    match faults.reach(f"{faults.ANSWER}{method.name}"):
        case "drop":
            await trio.sleep_forever()
        case "garble":
            return replace(outcome, payload=memoryview(b"\xff" * outcome.payload.nbytes))
    return outcome


def flat(payload: Buffer) -> memoryview:
    """Return a flat view of the payload's bytes (tensors come as typed memoryviews)."""
    return memoryview(payload).cast("B")


def _reply_header(method: Method[Any, Any], outcome: Outcome) -> ReplyHeader:
    """Return the header of an answer, or one that says that it is too large."""
    body = _NO_BODY if outcome.body is None else msgspec.Raw(msgspec.msgpack.encode(outcome.body))
    if len(body) > method.header_bytes - _HEADER_SLACK:
        problem = f"a header of {len(body)} bytes is over the limit of {method.header_bytes}"
        return ReplyHeader(TooLarge.__name__, problem, 0, _NO_BODY)
    code, message = cut(outcome.code, CODE_MAX), cut(outcome.message, MESSAGE_MAX)
    return ReplyHeader(code, message, outcome.payload.nbytes, body)


def _decode(raw: msgspec.Raw, type_: type[Any], name: str) -> Any:
    try:
        return msgspec.msgpack.decode(raw, type=type_)
    except MALFORMED as error:
        raise ProtocolViolation(f"{name} with a malformed body: {told(error)}") from error
