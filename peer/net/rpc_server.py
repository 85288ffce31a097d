"""The inbound half of rpc: checks a request step by step, runs its handler, answers.

Nothing that a peer sends ends our process: a violation costs it a `peer_penalized` event and a reset stream. A handler
runs under its caller's deadline and is cancelled when the caller goes away.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Final

import msgspec
import trio

from peer import faults
from peer.decoding import MALFORMED, told
from peer.errors import BarnraiseError, ConnectionLost, NotAdmitted, ProtocolViolation, TooLarge
from peer.events import EventLog
from peer.net.limits import ByteBudget, NetLimits
from peer.net.method import Call, Handler, Method
from peer.net.rate_limit import Meter
from peer.net.standing import Standing
from peer.net.wire import Buffer, Channel, Frames, ReplyHeader, RequestHeader

INTERNAL: Final = "internal"
UNKNOWN_METHOD: Final = "UnknownMethod"
BUSY: Final = "Busy"
_REFUSAL_S: Final = 5.0
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


@dataclass(eq=False)
class RegisteredMethod:
    """A method and its handler."""

    method: Method[Any, Any]
    handler: Handler[Any, Any]
    running: set[trio.CancelScope] = field(default_factory=set)
    """The scopes of its running handlers."""
    withdrawn: bool = False

    def withdraw(self) -> None:
        self.withdrawn = True
        for running in tuple(self.running):
            running.cancel()


class RpcServer:
    """The methods registered at this host, and the bounds of calls to them."""

    def __init__(self, limits: NetLimits, meter: Meter, events: EventLog, standing: Standing) -> None:
        self._standing = standing
        self._limits = limits
        self._meter = meter
        self._events = events
        self._methods: dict[str, RegisteredMethod] = {}
        self._calls: Counter[str] = Counter()
        self._budget = ByteBudget(limits.payload_bytes_in_flight)

    def add(self, method: Method[Any, Any], handler: Handler[Any, Any]) -> None:
        if method.name in self._methods:
            raise ValueError(f"{method.name} is registered already")
        self._methods[method.name] = RegisteredMethod(method, handler)

    @contextmanager
    def scope(self) -> Iterator[None]:
        """Withdraw at the end of the block the methods that were registered in it, and cancel their handlers."""
        before = set(self._methods)
        try:
            yield
        finally:
            for name in self._methods.keys() - before:
                self._methods.pop(name).withdraw()

    def strike(self, peer: str, reason: str) -> None:
        """Record that `peer` broke the protocol."""
        self._events.emit("peer_penalized", peer=peer, reason=reason)

    async def serve(self, channel: Channel) -> bool:
        """Answer one call on `channel`. Returns whether the channel ended in order (and was finished)."""
        peer = channel.peer
        frames = Frames(channel, self._meter, self._limits.header_bytes)
        self._calls[peer] += 1
        try:
            if self._calls[peer] > self._limits.calls_in_per_peer or self._calls.total() > self._limits.calls_in_total:
                await self._refuse(frames, BUSY, "too many calls at once: try again in a moment")
                answered = False
            else:
                answered = await self._answer(peer, frames)
        except ProtocolViolation as error:
            self.strike(peer, str(error))
            answered = False
        except ConnectionLost:
            answered = False
        finally:
            self._calls[peer] -= 1
            if not self._calls[peer]:
                del self._calls[peer]
        if answered:
            channel.finish()
        else:
            channel.abandon()
        return answered

    async def _answer(self, peer: str, frames: Frames) -> bool:
        with trio.move_on_after(self._limits.header_timeout_s) as timeout:
            header = await frames.receive_header(RequestHeader)
        if timeout.cancelled_caught:
            return False
        if header.method not in self._methods:  # no violation: we may just be starting
            await self._refuse(frames, UNKNOWN_METHOD, f"this peer does not serve {header.method[:64]}")
            return False
        served = self._methods[header.method]
        method = served.method
        if header.payload_bytes > method.request_payload_max:
            raise ProtocolViolation(
                f"{method.name} with {header.payload_bytes} bytes, over the limit of {method.request_payload_max}"
            )
        try:
            self._standing.check(peer, method.name, method.access)
        except NotAdmitted as error:
            await self._refuse(frames, type(error).__name__, str(error))
            return False
        body = _decode(header.body, method.request, method.name)
        answered = False
        left_s = max(0.0, header.timeout_ms / 1e3)  # a caller whose loop lags may be late already
        with trio.move_on_after(min(left_s, self._limits.call_timeout_s)):
            async with self._budget.claim(peer, header.payload_bytes):
                payload = await frames.receive_payload(header.payload_bytes, self._limits.payload_idle_s)
                outcome = await self._run_watched(frames, served, Call(peer, body, payload))
                if outcome is not None:
                    await _send(frames, outcome)
                    answered = True
        return answered

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
        """Return what the handler answers or raises as an outcome. This is the rpc edge."""
        try:
            answer = await handler(call)
        except ProtocolViolation as error:
            self.strike(call.peer, f"{method.name}: {error}")
            return Outcome(type(error).__name__, str(error), None, _NOTHING)
        except BarnraiseError as error:
            return Outcome(type(error).__name__, str(error), None, _NOTHING)
        except Exception as error:  # noqa: BLE001 - the rpc edge: our bug is the caller's error and our event
            return self._bug(method, repr(error), traceback.format_exc())
        body, payload = answer if isinstance(answer, tuple) else (answer, b"")
        view = flat(payload)
        if view.nbytes > method.reply_payload_max or not isinstance(body, method.reply):
            return self._bug(method, f"answered with {type(body).__name__} and {view.nbytes} bytes", "")
        return Outcome("", "", body, view)

    def _bug(self, method: Method[Any, Any], error: str, trace: str) -> Outcome:
        self._events.emit("bug", where=method.name, error=error, trace=trace.splitlines()[-_TRACE_LINES:])
        return Outcome(INTERNAL, f"a bug in {method.name}; that peer's events have the details", None, _NOTHING)

    async def _refuse(self, frames: Frames, code: str, message: str) -> None:
        """Answer before the payload is read: the caller stops sending when it sees the reply."""
        with trio.move_on_after(self._limits.header_timeout_s) as timeout:
            await frames.send(ReplyHeader(code, message, 0, _NO_BODY), _NOTHING)
            timeout.deadline = trio.current_time() + _REFUSAL_S
            await frames.discard()


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


async def _send(frames: Frames, outcome: Outcome) -> None:
    try:
        await frames.send(_reply_header(outcome), outcome.payload)
    except TooLarge as error:
        await frames.send(ReplyHeader(type(error).__name__, str(error), 0, _NO_BODY), _NOTHING)


def _reply_header(outcome: Outcome) -> ReplyHeader:
    body = _NO_BODY if outcome.body is None else msgspec.Raw(msgspec.msgpack.encode(outcome.body))
    return ReplyHeader(outcome.code, outcome.message, outcome.payload.nbytes, body)


def _decode(raw: msgspec.Raw, type_: type[Any], name: str) -> Any:
    try:
        return msgspec.msgpack.decode(raw, type=type_)
    except MALFORMED as error:
        raise ProtocolViolation(f"{name} with a malformed body: {told(error)}") from error
