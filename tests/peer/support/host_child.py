"""A host in a process of its own, for tests that kill and freeze it. Prints its address; ends when stdin does."""

from __future__ import annotations

import os
import resource
import sys
import time

import msgspec
import trio
from libp2p.identity.update import _safe_parse_multiaddr_cached

from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from peer.net.method import Call, Method
from peer.net.reach import Reach
from tests.peer.support.clock import CLOCK, clock


class Number(msgspec.Struct, frozen=True):
    value: int


class Cost(msgspec.Struct, frozen=True):
    """What this process has used."""

    cpu_s: float
    resident_bytes: int
    files: int
    kept_addresses: int
    """Entries of the library's cache of other peers' addresses."""


ECHO = Method("test/echo", Number, Number, request_payload_max=1 << 30, reply_payload_max=1 << 30)
STALL = Method("test/stall", Number, Number)
COST = Method("test/cost", Number, Cost)


async def echo(call: Call[Number]) -> tuple[Number, memoryview]:
    return Number(call.body.value + 1), call.payload


async def stall(call: Call[Number]) -> Number:
    await trio.sleep_forever()
    return call.body


async def cost(call: Call[Number]) -> Cost:
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * resource.getpagesize()
    kept = _safe_parse_multiaddr_cached.cache_info().currsize
    return Cost(time.process_time(), resident, len(os.listdir("/proc/self/fd")), kept)


async def main() -> None:
    listen = sys.argv[1] if len(sys.argv) > 1 else "/ip4/127.0.0.1/tcp/0"
    seed = bytes.fromhex(sys.argv[2]) if len(sys.argv) > 2 else b""
    identity = Identity(seed) if seed else Identity.generate()
    async with open_host(identity=identity, events=EventLog(), reach=Reach((listen,))) as host:
        host.rpc.register(ECHO, echo)
        host.rpc.register(STALL, stall)
        host.rpc.register(COST, cost)
        host.rpc.register(CLOCK, clock)
        sys.stdout.write(host.addresses[0] + "\n")
        sys.stdout.flush()
        stdin = trio.lowlevel.FdStream(0)
        while await stdin.receive_some():
            pass


if __name__ == "__main__":
    trio.run(main)
