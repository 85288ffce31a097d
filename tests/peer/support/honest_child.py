"""An honest caller in a process of its own: honest_child.py ADDRESS. Prints a line once connected.

Each line of stdin begins a measurement, at a hundred calls a second, or ends the one under way after at least CALLS_MIN
calls. The end is answered by one line of JSON: the calls' 99th percentile and maximum, in seconds of `clock.cpu_s`.
"""

from __future__ import annotations

import json
import sys
import time

import trio

from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import open_host
from tests.peer.support.clock import CLOCK, Ask, cpu_s

CALLER = Identity(bytes([201]) * 32)
CALLS_PER_S = 100
CALLS_MIN = 200


def say(what: object) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


async def main(address: str) -> None:
    async with open_host(identity=CALLER, events=EventLog()) as host:
        victim = await host.connect_address(address, timeout_s=60)
        pid = (await host.rpc.call(victim, CLOCK, Ask(), timeout_s=60)).body.pid
        stdin = trio.lowlevel.FdStream(0)

        async def measure(ended: trio.Event) -> None:
            took: list[float] = []

            async def call() -> None:
                theirs, ours = cpu_s(pid), time.process_time()
                answered_at = (await host.rpc.call(victim, CLOCK, Ask(), timeout_s=120)).body.cpu_s
                took.append(answered_at - theirs + time.process_time() - ours)

            async with trio.open_nursery() as nursery:
                began, number = trio.current_time(), 0
                while number < CALLS_MIN or not ended.is_set():
                    nursery.start_soon(call)
                    number += 1
                    await trio.sleep_until(began + number / CALLS_PER_S)
            took.sort()
            say({"calls": len(took), "p50": took[len(took) // 2], "p99": took[len(took) * 99 // 100], "max": took[-1]})

        say({"calling": victim})
        async with trio.open_nursery() as nursery:
            under_way: trio.Event | None = None
            unread = b""
            while more := await stdin.receive_some():
                *lines, unread = (unread + more).split(b"\n")
                for _ in lines:
                    if under_way is None:
                        under_way = trio.Event()
                        nursery.start_soon(measure, under_way)
                    else:
                        under_way.set()
                        under_way = None


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
