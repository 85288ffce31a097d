"""Strangers to a closed run, in a process of their own. They serve every method of the protocol and record what comes.

    python -m tests.support.stranger FOLDER RUN_ID MODE...

Each mode is a host without a gate that answers every call, and calls every method at every peer that it knows:

    garbage     with what is no message
    zero        with the least message of the right type
    plausible   with fields of the right sizes, echoes, records of its own, and what a real member answers to the same
    refusing    with NotAdmitted, to every call

The first line of stdin names the address of a member to begin with. Further lines ask for a report, which is one JSON
line. `input.bin` in the folder holds every byte that arrived, after decryption; `calls.bin` those of calls to us.
"""

from __future__ import annotations

import json
import random
import sys
import time
from collections import Counter
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from dht.protocol import HeldRecord
from dht.records import sign_record
from peer.errors import BarnraiseError, NotAdmitted, RemoteError
from peer.events import EventLog
from peer.identity import Identity, Signed
from peer.net.bulk.tls import TlsSocket
from peer.net.host import Host, open_host
from peer.net.libp2p_fixes.noise import NoiseTransport
from peer.net.method import Call, Method
from peer.net.rpc_server import Outcome, RegisteredMethod
from peer.net.stream_channel import StreamChannel
from swarm.membership.member_record import MEMBERS, MemberRecord
from tests.support.protocol_methods import all_methods, garbage, made_up

OF_THE_HOST: Final = ("net/hello", "net/ping", "net/bulk")  # a peer that does not answer these is not called at all
CALL_S: Final = 3.0
PAUSE_S: Final = 2.0
KEPT_MAX: Final = 200  # messages to replay


class Recorder:
    """Everything that arrives, in two files."""

    def __init__(self, folder: Path) -> None:
        self._input = (folder / "input.bin").open("ab", buffering=0)
        self._calls = (folder / "calls.bin").open("ab", buffering=0)
        decrypt, read, receive_into, receive = (
            NoiseTransport.decrypt,
            StreamChannel._read,
            StreamChannel.receive_into,
            TlsSocket.receive_into,
        )
        began = StreamChannel.__init__

        def noted_decrypt(transport: NoiseTransport, data: bytes | memoryview) -> bytes:
            plain = decrypt(transport, data)
            self._input.write(plain)
            return plain

        def noted_begin(channel: Any, peer: str, stream: Any, **options: Any) -> None:
            began(channel, peer, stream, **options)
            channel.is_call_to_us = not options["expects_greeting"]

        async def noted_read(channel: Any, max_bytes: int) -> bytes:
            data = await read(channel, max_bytes)
            if channel.is_call_to_us:
                self._calls.write(data)
            return data

        async def noted_receive_into(channel: Any, view: memoryview) -> int:
            count = await receive_into(channel, view)
            if channel.is_call_to_us:
                self._calls.write(view[:count])
            return count

        async def noted_receive(socket: TlsSocket, view: memoryview, expected: int = 1) -> int:
            count = await receive(socket, view, expected)
            for file in (self._input, self._calls):
                file.write(view[:count])
            return count

        for owner, method, noted in (
            (NoiseTransport, "decrypt", noted_decrypt),
            (StreamChannel, "__init__", noted_begin),
            (StreamChannel, "_read", noted_read),
            (StreamChannel, "receive_into", noted_receive_into),
            (TlsSocket, "receive_into", noted_receive),
        ):
            setattr(owner, method, noted)


class Stranger:
    """One host that serves and calls everything."""

    def __init__(self, host: Host, mode: str, run_id: str) -> None:
        self.host, self.mode, self.run_id = host, mode, run_id
        self.asked = Counter[str]()
        """Calls to us, by method."""
        self.payload_bytes = 0
        self.answers = Counter[str]()
        """What members answered to our calls of methods that are not open: "method: error code", or "" for success."""
        self.replayed: list[tuple[str, msgspec.Raw]] = []
        self._known: dict[str, Any] = {}
        self._serve()

    def _serve(self) -> None:
        server = self.host.rpc.server

        async def unused(call: Call[Any]) -> Any:
            raise NotImplementedError

        for method in all_methods():
            if method.name not in OF_THE_HOST:
                server.add(method, unused)
        real = server.run

        async def run(served: RegisteredMethod, call: Call[Any]) -> Outcome:
            self.asked[served.method.name] += 1
            self.payload_bytes += len(call.payload)
            self._note(served.method, call)
            if served.method.name in OF_THE_HOST:
                return await real(served, call)
            return await self._answer(served.method, call)

        server.run = run  # type: ignore[method-assign]

    def _note(self, method: Method[Any, Any], call: Call[Any]) -> None:
        self._known |= {name: getattr(call.body, name) for name in call.body.__struct_fields__}
        if method.name.startswith("run."):
            self.replayed = [*self.replayed[-KEPT_MAX:], (method.name, msgspec.Raw(msgspec.msgpack.encode(call.body)))]

    async def _answer(self, method: Method[Any, Any], call: Call[Any]) -> Outcome:
        payload = random.randbytes(random.choice([0, 1, 100_000])) if self.mode == "garbage" else bytes(call.payload)
        if self.mode == "refusing":
            return Outcome(NotAdmitted.__name__, "this run has thrown you out: go away", None, memoryview(b""))
        if self.mode == "garbage":
            return Outcome("", "", garbage(), memoryview(payload))
        if self.mode == "plausible":
            if method.access == "open" and (passed_on := await self._ask_a_member(method, call)) is not None:
                return passed_on
            if method.name == "dht/fetch":
                held = [HeldRecord(signed, 9.0) for signed in self.records()]
                payload = msgspec.msgpack.encode(held)
        return Outcome("", "", self._made_up(method.reply), memoryview(payload))

    async def _ask_a_member(self, method: Method[Any, Any], call: Call[Any]) -> Outcome | None:
        """Pass an open call on to a real member, as a peer in the middle would, and return its answer."""
        for peer in sorted(self.host.connected - {call.peer}):
            try:
                reply = await self.host.rpc.call(peer, method, call.body, timeout_s=CALL_S)
            except BarnraiseError:
                continue
            return Outcome("", "", reply.body, reply.payload)
        return None

    def _made_up(self, type_: Any) -> Any:
        known = {} if self.mode == "zero" else self._known
        return made_up(type_, {**known, "clock_s": time.time(), "run_id": self.run_id}, zero=self.mode == "zero")

    def records(self) -> list[Signed]:
        """Return records of a replica of stage 1 that is fast and idle, of a feeder and of a coordinator."""
        signed = []
        for number, role in enumerate(("coordinator", "feeder", "full", "stage")):
            now = time.time()
            fields = {
                "session": "s", "name": "helper", "role": role, "version": "source", "phase": "training",
                "addresses": list(self.host.addresses), "stage": 1 if role == "stage" else -1, "rate": 1e3,
                "queue": 0.0, "joined_at": now, "at": now, "term": 1, "round": 5, "state_hash": bytes(32), "head": b"",
            }  # fmt: skip
            record, issued_us = made_up(MemberRecord, fields, zero=True), int(now * 1e6) + number
            run_id = self.run_id
            signed.append(
                sign_record(self.host.identity, run_id, MEMBERS, run_id, record, ttl_s=9.0, issued_us=issued_us)
            )
        return signed

    async def press(self) -> None:
        """Call every method at every peer that is connected, again and again."""
        while True:
            for peer in sorted(self.host.connected):
                for method in all_methods():
                    await self._call(peer, method, self._made_up(method.request))
                for record in self.records():
                    known = {"namespace": self.run_id, "addresses": list(self.host.addresses[:8]), "record": record}
                    store = next(method for method in all_methods() if method.name == "dht/store")
                    await self._call(peer, store, made_up(store.request, known))
                for name, body in self.replayed[-20:]:
                    await self.replay(peer, name, body)
            await trio.sleep(PAUSE_S)

    async def replay(self, peer: str, name: str, body: msgspec.Raw) -> None:
        method = next(method for method in all_methods() if method.name == name)
        await self._call(peer, method, body)

    async def _call(self, peer: str, method: Method[Any, Any], body: Any) -> None:
        code = ""
        try:
            payload = random.randbytes(100) if method.name in ("pipeline.forward", "exchange.contribution") else b""
            await self.host.rpc.call(peer, method, body, payload, timeout_s=CALL_S)
        except RemoteError as error:
            code = error.code
        except BarnraiseError as error:
            code = type(error).__name__
        if method.access != "open":
            self.answers[f"{method.name}: {code}"] += 1

    def report(self) -> dict[str, Any]:
        return {
            "mode": self.mode,
            "peer": self.host.peer_id,
            "asked": dict(self.asked),
            "payload_bytes": self.payload_bytes,
            "answers": dict(self.answers),
            "known": sorted(self.host.connected),
        }


async def replay_all(host: Stranger, others: list[Stranger]) -> None:
    """Say as a second identity what was said to the others."""
    said = set[tuple[str, bytes]]()
    while True:
        for other in others:
            for peer in sorted(other.host.connected):
                host.host.book.add(peer, other.host.book.get(peer))
                for name, body in list(other.replayed):
                    if (name, peer.encode() + bytes(body)) not in said and len(said) < 10 * KEPT_MAX:
                        said.add((name, peer.encode() + bytes(body)))
                        await host.replay(peer, name, body)
        await trio.sleep(PAUSE_S)


async def main(folder: Path, run_id: str, modes: list[str]) -> None:
    Recorder(folder)
    async with AsyncExitStack() as stack, trio.open_nursery() as nursery:
        strangers = []
        for mode in [*modes, "zero"]:
            config = open_host(identity=Identity.generate(), events=EventLog())
            strangers.append(Stranger(await stack.enter_async_context(config), mode, run_id))
        *first, second = strangers
        tell({stranger.mode: stranger.host.addresses[0] for stranger in first})
        stdin, begun = trio.lowlevel.FdStream(0), False
        while line := await stdin.receive_some():
            if not begun:
                begun = True
                for stranger in first:
                    await stranger.host.connect_address(line.decode().strip(), timeout_s=10)
                for stranger in strangers:
                    nursery.start_soon(stranger.press)
                nursery.start_soon(replay_all, second, first)
            tell([stranger.report() for stranger in strangers])
        nursery.cancel_scope.cancel()


def tell(what: Any) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
