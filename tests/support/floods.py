"""Floods of one peer by strangers, in a process of their own.

    python -m tests.support.floods INVITE

Each line of stdin is a command, answered by one line of JSON:

    begin NAME    begin a flood, at the rate of a link of 100 Mbit/s; answered once the first bytes are sent
    fill          send without a pause, as much as `FILL_BYTES`
    end           leave: every connection is closed
"""

from __future__ import annotations

import json
import os
import random
import struct
import sys
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from typing import Any, Final

import msgspec
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID
from multiaddr import Multiaddr

from dht.protocol import STORE, StoreRequest
from dht.records import sign_record
from peer.errors import BarnraiseError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.bulk.transport import OFFER, OfferRequest
from peer.net.host import open_host
from peer.net.reach import Reach
from peer.net.stream_channel import PROTOCOL
from peer.net.wire import RequestHeader
from swarm.client.session import RunClient, open_client
from swarm.membership.member_record import MEMBERS, MemberRecord
from swarm.run.invite import Invite
from tests.support.protocol_methods import made_up

SOURCE: Final = "127.0.66.1"  # of another address prefix than the honest caller
BYTES_PER_S: Final = 12.5e6
FILL_BYTES: Final = 150 << 20
BEGIN_S: Final = 20.0
FILL_S: Final = 3.0  # most floods are of small messages and send less
IDENTITIES: Final = 5
GREETING: Final = b"\x13/multistream/1.0.0\n"
REDIAL_S: Final = 0.1
HEADERS_HELD_S: Final = 5.0
HEADER_BYTES: Final = (1 << 20) - 5
PUSH_BYTES: Final = 1_000_000
ENDED: Final = (
    BaseLibp2pError,
    BarnraiseError,
    OSError,
    trio.BrokenResourceError,
    trio.ClosedResourceError,
    ValueError,
)


class Link:
    """The attackers' link: bytes take their time on it, until `fill`."""

    def __init__(self) -> None:
        self._free_at = 0.0
        self.sent_bytes = 0
        self.filling = False
        self._filled = 0

    async def take(self, size_bytes: int) -> None:
        self.sent_bytes += size_bytes
        if self.filling and self._filled < FILL_BYTES:
            self._filled += size_bytes
            await trio.lowlevel.checkpoint()
            return
        self._free_at = max(self._free_at, trio.current_time()) + size_bytes / BYTES_PER_S
        await trio.sleep_until(self._free_at)

    @property
    def is_full(self) -> bool:
        return self._filled >= FILL_BYTES


class Attack:
    """The peer under attack, and the attackers' link."""

    def __init__(self, invite: str, link: Link) -> None:
        self.invite, self.link = Invite.parse(invite), link
        address = self.invite.addresses[0]
        self.bare, _, self.peer = address.partition("/p2p/")
        self.ip, self.port = address.split("/")[2], int(address.split("/")[4])

    async def press(self, task: Callable[[Any], Awaitable[None]], identities: int = IDENTITIES) -> None:
        """Run a task for each of some identities that have entered nothing, on a connection of its own; on another one
        where that is ended."""

        async def keep() -> None:
            config = open_host(identity=Identity.generate(), events=EventLog())
            async with config as host:
                network = host.libp2p.get_network()
                while True:
                    with suppress(*ENDED):
                        await task(await network.dial_addr(Multiaddr(self.bare), ID.from_base58(self.peer)))
                    await self.link.take(2000)
                    await trio.sleep(REDIAL_S)

        await together(*[keep] * identities)

    async def stream(self, connection: Any, protocol: str) -> Any:
        stream = await connection.new_stream()
        await stream.write(GREETING + bytes([len(protocol) + 1]) + protocol.encode() + b"\n")
        return stream


async def handshakes(attack: Attack) -> None:
    """Half of them to the end, half of them garbage."""

    async def whole() -> None:
        while True:
            async with open_host(identity=Identity.generate(), events=EventLog(), reach=Reach(())) as host:
                for _ in range(10):
                    await attack.link.take(1000)
                    with suppress(*ENDED):
                        network = host.libp2p.get_network()
                        connection = await network.dial_addr(Multiaddr(attack.bare), ID.from_base58(attack.peer))
                        await connection.close()

    async def broken() -> None:
        while True:
            await attack.link.take(2000)
            with suppress(*ENDED):
                async with await trio.open_tcp_stream(attack.ip, attack.port) as socket:
                    noise = GREETING + b"\x07/noise\n" + b"\x00\x20" + random.randbytes(32)
                    await socket.send_all(noise + b"\xff\xff" + random.randbytes(1000))

    await together(*[whole] * 4, *[broken] * 4)


async def streams(attack: Attack) -> None:
    """Opened and reset, and opened and left."""

    async def press(connection: Any) -> None:
        for number in range(1 << 30):
            await attack.link.take(200)
            stream = await attack.stream(connection, PROTOCOL)
            if number % 4:
                await stream.reset()

    await attack.press(press)


async def headers(attack: Attack) -> None:
    """As long as headers may be, less their last byte."""

    async def press(connection: Any) -> None:
        for _ in range(50):
            stream = await attack.stream(connection, PROTOCOL)
            await stream.write(struct.pack("!I", HEADER_BYTES))
            left = HEADER_BYTES - 1
            while left:
                size = min(left, 1 << 16)
                await attack.link.take(size)
                await stream.write(bytes(size))
                left -= size
        await trio.sleep(HEADERS_HELD_S)

    await attack.press(press)


async def store_at(attack: Attack, client: RunClient) -> None:
    run_id, host = client.manifest.run_id, client.host
    longest = {"name": "n" * 64, "addresses": [f"/ip4/127.0.0.1/tcp/{port}" for port in range(40_000, 40_008)]}
    for number in range(1 << 30):
        record = made_up(MemberRecord, {**longest, "role": "stage", "at": time.time()}, zero=True)
        key = run_id if number % 2 else f"{number}"
        issued_us = int(time.time() * 1e6)
        await attack.link.take(1000)
        with suppress(*ENDED):
            signed = sign_record(host.identity, run_id, MEMBERS, key, record, ttl_s=60.0, issued_us=issued_us)
            await host.rpc.call(attack.peer, STORE, StoreRequest(run_id, host.addresses[:8], signed), timeout_s=5)


async def records(attack: Attack) -> None:
    """Under the members' key and under others."""

    async def press() -> None:
        async with open_client(attack.invite) as client:
            await store_at(attack, client)

    await together(*[press] * IDENTITIES)


async def pushes(attack: Attack) -> None:
    """New addresses of a megabyte each, by identify."""

    async def press(connection: Any) -> None:
        while True:
            stream = await attack.stream(connection, "/ipfs/id/push/1.0.0")
            message = b"\x12" + varint(PUSH_BYTES) + b"\x04\x7f\x00\x00\x01\x06" + random.randbytes(PUSH_BYTES - 6)
            message = varint(len(message)) + message
            for start in range(0, len(message), 1 << 16):
                await attack.link.take(1 << 16)
                await stream.write(message[start : start + (1 << 16)])
            await stream.close()

    await attack.press(press)


async def log_lines(attack: Attack) -> None:
    """Calls that break the protocol, each of which is worth a line."""
    bodies = (b"\xc1", b"\x1b]0;title\x07", msgspec.msgpack.encode({"addresses": "\x1b[2J"}))

    async def press(connection: Any) -> None:
        while True:
            await attack.link.take(300)
            with suppress(*ENDED):
                stream = await attack.stream(connection, PROTOCOL)
                header = RequestHeader("net/hello", 0, 1000, msgspec.Raw(random.choice(bodies)))
                encoded = msgspec.msgpack.encode(header)
                await stream.write(struct.pack("!I", len(encoded)) + encoded)
                await stream.read(1000)

    await attack.press(press, 3 * IDENTITIES)


async def half_open(attack: Attack) -> None:
    """Sockets that say nothing, on both ports, made again each second."""
    async with open_client(attack.invite) as client:
        offer = (await client.host.rpc.call(attack.peer, OFFER, OfferRequest(), timeout_s=5)).body

    async def press(port: int) -> None:
        while True:
            async with AsyncExitStack() as held:
                for _ in range(40):
                    await attack.link.take(100)
                    with suppress(OSError):
                        await held.enter_async_context(await trio.open_tcp_stream(attack.ip, port))
                await trio.sleep(1)

    await together(lambda: press(attack.port), lambda: press(offer.port))


FLOODS: Final[dict[str, Callable[[Attack], Awaitable[None]]]] = {
    flood.__name__: flood for flood in (handshakes, streams, headers, records, pushes, log_lines, half_open)
}


def varint(number: int) -> bytes:
    out = b""
    while number > 0x7F:
        out, number = out + bytes([number & 0x7F | 0x80]), number >> 7
    return out + bytes([number])


async def together(*tasks: Callable[[], Awaitable[None]]) -> None:
    """Run all of them. One that is thrown out ends, or begins again if it can."""
    async with trio.open_nursery() as nursery:
        for task in tasks:

            async def keep(task: Callable[[], Awaitable[None]] = task) -> None:
                with suppress(*ENDED):
                    await task()

            nursery.start_soon(keep)


async def main(invite: str) -> None:
    os.setpriority(os.PRIO_PROCESS, 0, 19)  # what it costs us must not slow the honest caller
    trio.open_tcp_stream = partial(trio.open_tcp_stream, local_address=SOURCE)
    say({"ready": True})
    stdin, unread = trio.lowlevel.FdStream(0), b""
    link, scope, ended = Link(), trio.CancelScope(), trio.Event()

    async def run(name: str) -> None:
        with scope:
            await FLOODS[name](Attack(invite, link))
            await trio.sleep_forever()
        ended.set()

    async with trio.open_nursery() as nursery:
        while chunk := await stdin.receive_some():
            *lines, unread = (unread + chunk).split(b"\n")
            for line in lines:
                command, _, name = line.decode().partition(" ")
                if command == "begin":
                    link, scope, ended = Link(), trio.CancelScope(), trio.Event()
                    nursery.start_soon(run, name)
                    with trio.move_on_after(BEGIN_S):
                        while not link.sent_bytes:
                            await trio.sleep(0.01)
                elif command == "fill":
                    link.filling = True
                    with trio.move_on_after(FILL_S):
                        while not link.is_full:
                            await trio.sleep(0.05)
                else:
                    scope.cancel()
                    await ended.wait()
                say({"sent_bytes": link.sent_bytes})
        nursery.cancel_scope.cancel()


def say(what: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
