"""Mutated calls into the handlers of a running peer, as a peer with an identity of its own sends them."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import msgspec
import trio

from peer.errors import ConnectionLost
from peer.events import Event
from peer.net.host import Host
from peer.net.wire import Buffer, Channel, ReplyHeader, RequestHeader
from tests.fuzz.support import guard
from tests.fuzz.support.guard import SEED, LongestStep, chance_for, no_growth
from tests.fuzz.support.instances import Instances
from tests.fuzz.support.mutations import of_bytes, of_msgpack

AT_ONCE = 40  # below the number of calls that one peer may keep open
TIMEOUT_MS = 100  # a caller's deadline ends every wait by design: for a promise, a roster, an epoch, a partner
ANSWER_S = 20.0  # a machine may stand still, a call may not stay open
TEXT_MAX = 4096
_SIZE = struct.Struct("!I")

Pool = Mapping[str, list[Any]]


class OneCall(Channel):
    """The stream of one call: its bytes lie ready. After them it `ends`, or stays open until the other side is done."""

    def __init__(self, peer: str, data: bytes, ends: bool) -> None:
        self.peer, self._left, self._ends, self.answer = peer, memoryview(data), ends, bytearray()
        self._over = trio.Event()

    async def send(self, data: Buffer) -> None:
        await trio.lowlevel.checkpoint()
        self.answer += data
        self._ends = True  # a caller that is refused sends no more
        self._over.set()

    async def receive(self, max_bytes: int) -> Buffer:
        await trio.lowlevel.checkpoint()
        if not self._left and not self._ends:
            await self._over.wait()
        if not self._left:
            raise ConnectionLost("the end")
        piece, self._left = self._left[:max_bytes], self._left[max_bytes:]
        return bytes(piece)

    async def receive_into(self, view: memoryview) -> int:
        data = await self.receive(len(view))
        view[: len(data)] = data
        return len(data)

    def finish(self) -> None:
        self._over.set()

    def abandon(self) -> None:
        self._over.set()


class Striker:
    """Sends mutated calls to `victim` in the name of the peer `name`; `pool()` returns values that fit the moment."""

    def __init__(self, victim: Host, name: str, pool: Callable[[], Pool], seed: str) -> None:
        self.outcomes: Counter[str] = Counter()
        self.tried: set[str] = set()
        self._victim, self._name, self._pool, self._chance = victim, name, pool, chance_for(seed)

    async def strike(self, count: int, only: frozenset[str] | None = None) -> None:
        """Send `count` calls of each method that the victim serves."""
        names = sorted(name for name in self._victim.rpc.server._methods if only is None or name in only)
        for _ in range(0, count, AT_ONCE):
            for name in names:
                self.tried.add(name)
                makes = Instances(self._chance, self._pool())
                async with trio.open_nursery() as nursery:
                    for _ in range(min(AT_ONCE, count)):
                        nursery.start_soon(self._call, name, *self._frame(name, makes))

    def _frame(self, name: str, makes: Instances) -> tuple[bytes, bool]:
        """Return a call: half are valid, the others have a mutated body, payload or frame. A mutated frame may
        declare more than follows, so its stream ends: the timeout of a header is 10 s."""
        chance, method = self._chance, self._victim.rpc.server._methods[name].method
        body, payload = makes.encoded(method.request), chance.randbytes(min(method.request_payload_max, 1 << 12))
        kind = chance.random()
        if kind < 0.4:
            body = of_msgpack(chance, body, makes.encoded(method.request))
        if chance.random() < 0.3:
            payload = payload[: chance.randrange(len(payload) + 1)]
        encoded = msgspec.msgpack.encode(RequestHeader(name, len(payload), TIMEOUT_MS, msgspec.Raw(body)))
        frame = _SIZE.pack(len(encoded)) + encoded
        garbled = kind > 0.9
        return (of_bytes(chance, frame, frame) if garbled else frame) + payload, garbled

    async def _call(self, name: str, frame: bytes, ends: bool) -> None:
        channel = OneCall(self._name, frame, ends)
        with trio.move_on_after(ANSWER_S) as timeout:
            await self._victim.rpc.server.serve(channel)
        assert not timeout.cancelled_caught, f"{name} was neither answered nor closed: {frame[:300]!r}"
        self.outcomes[_code(bytes(channel.answer))] += 1


def _code(answer: bytes) -> str:
    """Return what a call came to: "answered", "closed", or the name of an error."""
    if not answer:
        return "closed"
    (size,) = _SIZE.unpack_from(answer)
    header = msgspec.msgpack.decode(answer[_SIZE.size : _SIZE.size + size], type=ReplyHeader)
    return header.code or "answered"


def plain(value: Any) -> Any:
    """Return a message as the plain objects of a pool."""
    return msgspec.msgpack.decode(msgspec.msgpack.encode(value))


class Watch:
    """Holds over a block that no handler failed, the loop never stood still, no log was filled and no memory kept."""

    def __init__(self, *victims: Host) -> None:
        self.wrong: list[Event] = []
        self._victims, self._stack = victims, ExitStack()

    def __enter__(self) -> Watch:
        for victim in self._victims:
            self._stack.enter_context(victim.events.subscribed(self._look))
        self._stack.enter_context(no_growth())
        self._step = LongestStep(trio.lowlevel.current_task())
        trio.lowlevel.add_instrument(self._step)
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        trio.lowlevel.remove_instrument(self._step)
        if kind is not None:
            return
        self._stack.close()
        assert not self.wrong, f"FUZZ_SEED={SEED}: {self.wrong[0].name} {str(self.wrong[0].fields)[:TEXT_MAX]}"
        assert self._step.seconds < guard.SECONDS_MAX, (
            f"FUZZ_SEED={SEED}: {self._step.task} took {self._step.seconds:.2f} s"
        )

    def _look(self, event: Event) -> None:
        """Keep an event that tells of a bug, or whose text a peer made long."""
        if event.name == "bug" or any(len(str(field)) > TEXT_MAX for field in event.fields.values()):
            self.wrong.append(event)
