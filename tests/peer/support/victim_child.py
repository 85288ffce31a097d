"""A host under attack, in a process of its own so that its memory can be measured. Prints its address; ends when stdin
does. With "guarded" it belongs to an open run: attackers are members that are not trusted, HONEST is trusted."""

from __future__ import annotations

import resource
import sys

import msgspec
import trio

from peer.events import Event, EventLog
from peer.identity import Identity
from peer.net.host import open_host
from peer.net.limits import NetLimits
from peer.net.method import Call, Method
from peer.net.wire import LARGE_HEADER_BYTES
from tests.peer.support.clock import CLOCK, clock
from tests.peer.support.honest_child import CALLER

BUDGET = 128 << 20
SLICE = 8 << 20
REPLY = 1 << 20
ATTACKERS = 7


class Text(msgspec.Struct, frozen=True):
    value: str = ""


class Figures(msgspec.Struct, frozen=True):
    """What the victim sees of itself."""

    resident: int
    bugs: int
    penalties: int


FIGURES = Method("test/figures", Text, Figures, access="open")
WORDY = Method("test/wordy", Text, Text, header_bytes=LARGE_HEADER_BYTES)
ASK = Method("test/ask", Text, Text, reply_payload_max=REPLY, access="client")
TAKE = Method("test/take", Text, Text, request_payload_max=SLICE)


def attacker(number: int) -> Identity:
    return Identity(bytes([1 + number]) * 32)


HONEST = Identity(bytes([200]) * 32)


def resident_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * resource.getpagesize()


async def main() -> None:
    counts = {"bug": 0, "peer_penalized": 0}

    def note(event: Event) -> None:
        if event.name in counts:
            counts[event.name] += 1

    async def figures(call: Call[Text]) -> Figures:
        return Figures(resident_bytes(), counts["bug"], counts["peer_penalized"])

    async def echo(call: Call[Text]) -> Text:
        return Text()

    async def ask(call: Call[Text]) -> tuple[Text, bytes]:
        return Text(), b"\x01" * REPLY

    events, limits = EventLog(), NetLimits(payload_bytes_in_flight=BUDGET)
    config = open_host(identity=Identity.generate(), events=events, limits=limits)
    with events.subscribed(note):
        async with config as host:
            if "guarded" in sys.argv:
                host.admissions.guard()
                for number in range(ATTACKERS):
                    host.admissions.grant(attacker(number).peer_id, "member", trusted=False)
                for honest in (HONEST, CALLER):
                    host.admissions.grant(honest.peer_id, "member", trusted=True)
            host.rpc.register(FIGURES, figures)
            host.rpc.register(CLOCK, clock)
            host.rpc.register(WORDY, echo)
            host.rpc.register(ASK, ask)
            host.rpc.register(TAKE, echo)
            sys.stdout.write(host.addresses[0] + "\n")
            sys.stdout.flush()
            stdin = trio.lowlevel.FdStream(0)
            while await stdin.receive_some():
                pass


if __name__ == "__main__":
    trio.run(main)
