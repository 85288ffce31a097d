"""One peer for `test_nat`: `python -m tests.support.nat.node [RELAY]` takes commands from its standard input, as lines
of JSON.

{"know": {ID: [ADDRESS...]}} learns addresses; {"reach": ID} connects, calls, moves a payload, and says by which path.
Prints {"peer", "addresses"} once its place at the relay is taken, then one line per `reach`. Ends with its input.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import msgspec
import trio

from peer.errors import BarnraiseError
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.method import Call, Method
from peer.net.nat import traversal
from peer.net.nat.reachability import probe
from peer.net.reach import Reach

PAYLOAD_BYTES = 4 << 20


class Note(msgspec.Struct, frozen=True):
    text: str


class PathSeen(msgspec.Struct, frozen=True):
    path: str


ECHO: Method[Note, Note] = Method("test/echo", Note, Note, PAYLOAD_BYTES, PAYLOAD_BYTES)
PATH: Method[Note, PathSeen] = Method("test/path", Note, PathSeen)


async def main(relay: str) -> None:
    async def echo(call: Call[Note]) -> tuple[Note, memoryview]:
        return call.body, call.payload

    relays = (relay,) if relay else ()
    listen = ("/ip4/0.0.0.0/tcp/4002",)
    config = open_host(identity=Identity.generate(), events=EventLog(), reach=Reach(listen, relays=relays))
    placed = trio.Event()
    async with config as host:
        host.rpc.register(ECHO, echo)
        host.rpc.register(PATH, lambda call: _seen(host, call))
        host.traversal.changed = placed.set
        if relays and not host.traversal.addresses:
            await placed.wait()
        _say({"peer": host.peer_id, "addresses": host.addresses})
        commands = trio.lowlevel.FdStream(os.dup(sys.stdin.fileno()))
        buffer = b""
        while data := await commands.receive_some():
            *lines, buffer = (buffer + data).split(b"\n")
            for line in lines:
                await _obey(host, json.loads(line))


async def _obey(host: Host, command: dict[str, Any]) -> None:
    for peer, addresses in command.get("know", {}).items():
        host.book.add(peer, addresses)
    if "reach" in command:
        try:
            _say(await _reach(host, command["reach"]))
        except BarnraiseError as error:
            _say({"kind": "unreachable", "detail": str(error)})


async def _reach(host: Host, peer: str) -> dict[str, Any]:
    """First call, then path, then a payload by that path and the other side's view of it."""
    began = trio.current_time()
    await host.rpc.call(peer, ECHO, Note("first"), timeout_s=60)
    first_s = trio.current_time() - began
    reachability = await probe(host, peer, timeout_s=120)
    settled_s = trio.current_time() - began
    payload = os.urandom(PAYLOAD_BYTES)
    began = trio.current_time()
    reply = await host.rpc.call(peer, ECHO, Note("bulk"), payload, timeout_s=60, bulk=True)
    seconds = trio.current_time() - began
    theirs = await host.rpc.call(peer, PATH, Note(""), timeout_s=60)
    return {
        "kind": reachability.kind,
        "detail": reachability.detail,
        "theirs": theirs.body.path,
        "intact": bytes(reply.payload) == payload,
        "first_s": round(first_s, 3),
        "settled_s": round(settled_s, 3),
        "bulk_s": round(seconds, 3),
    }


async def _seen(host: Host, call: Call[Note]) -> PathSeen:
    return PathSeen(str(host.path(call.peer)))


def _say(fact: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(fact) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    traversal._DIAL_BACK_S = 20.0  # type: ignore[misc]  # a peer that stands still meanwhile would punch a hole
    trio.run(main, sys.argv[1] if len(sys.argv) > 1 else "")
