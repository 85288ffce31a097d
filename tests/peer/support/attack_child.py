"""Attackers in a process of their own: ADDRESS KIND PEERS CALLS. Prints a line once they hold all they can hold; ends
when stdin does."""

from __future__ import annotations

import struct
import sys
from contextlib import suppress
from typing import Any

import msgspec
import trio
from libp2p.exceptions import BaseLibp2pError
from libp2p.peer.id import ID

from peer.errors import DialError
from peer.events import EventLog
from peer.net.host import Host, open_host
from peer.net.method import Method
from peer.net.stream_channel import PROTOCOL
from peer.net.wire import LARGE_HEADER_BYTES, RequestHeader
from tests.peer.support.victim_child import ASK, SLICE, TAKE, WORDY, Text, attacker

LOST = (BaseLibp2pError, OSError, trio.BrokenResourceError, trio.ClosedResourceError)
SENDING_S = 3.0  # the caps hold back most of what is sent


def request(method: Method[Any, Any], payload_bytes: int = 0, chars: int = 0) -> bytes:
    return frame(method, Text("x" * chars), payload_bytes)


def frame(method: Method[Any, Any], body: msgspec.Struct, payload_bytes: int = 0) -> bytes:
    raw = msgspec.Raw(msgspec.msgpack.encode(body))
    header = msgspec.msgpack.encode(RequestHeader(method.name, payload_bytes, 900_000, raw))
    return struct.pack("!I", len(header)) + header


ATTACKS = {
    "headers": request(WORDY, chars=LARGE_HEADER_BYTES - 100)[:-1],
    "small headers": request(WORDY, chars=(16 << 10) - 100)[:-1],
    "replies": request(ASK),
    "payloads": request(TAKE, SLICE) + bytes(SLICE - 1),
    "trickle": request(TAKE, SLICE) + bytes(1),
    "garbage": struct.pack("!I", 6) + b"\x1b[2J\n\n",
}


async def begin(host: Host, victim: str, frame: bytes) -> Any:
    """Send what begins a call; return its stream."""
    stream = await host.libp2p.new_stream(ID.from_base58(victim), [PROTOCOL])
    await stream.write(frame)
    return stream


async def hold(host: Host, victim: str, frame: bytes) -> None:
    """Make one call and keep it."""
    with suppress(*LOST), trio.move_on_after(SENDING_S):
        await begin(host, victim, frame)


async def flood(host: Host, victim: str, frame: bytes, calls: int) -> None:
    """Make one call after another, each ended by the victim."""
    for _ in range(calls):
        with suppress(*LOST):
            stream = await host.libp2p.new_stream(ID.from_base58(victim), [PROTOCOL])
            await stream.write(frame)
            while await stream.read(4096):
                pass


async def reach(host: Host, address: str) -> str:
    """Return the victim's peer id once it is reached: a busy machine takes its time, and an attacker goes on."""
    while True:
        with suppress(DialError):
            return await host.connect_address(address, timeout_s=60)


async def attack(number: int, address: str, kind: str, calls: int, begun: trio.Event) -> None:
    async with open_host(identity=attacker(number), events=EventLog()) as host:
        victim = await reach(host, address)
        async with trio.open_nursery() as nursery:
            if kind == "garbage":
                for _ in range(8):
                    nursery.start_soon(flood, host, victim, ATTACKS[kind], calls // 8)
            else:
                for _ in range(calls):
                    nursery.start_soon(hold, host, victim, ATTACKS[kind])
        begun.set()
        await trio.sleep_forever()


async def main() -> None:
    address, kind, peers, calls = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    async with trio.open_nursery() as nursery:
        begun = [trio.Event() for _ in range(peers)]
        for number in range(peers):
            nursery.start_soon(attack, number, address, kind, calls, begun[number])
        for event in begun:
            await event.wait()
        sys.stdout.write("holding\n")
        sys.stdout.flush()
        stdin = trio.lowlevel.FdStream(0)
        while await stdin.receive_some():
            pass
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main)
