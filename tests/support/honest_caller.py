"""An honest peer of an open run that calls one peer a hundred times a second, in a process of its own.

    python -m tests.support.honest_caller INVITE

Each line of stdin is a number of seconds. The answer is one line of JSON: how many calls failed, and the 99th
percentile of how long they took, in seconds from the moment at which they were due.
"""

from __future__ import annotations

import json
import sys
from typing import Final

import trio

from peer.errors import BarnraiseError
from peer.net.heartbeat import PING
from peer.net.method import Empty
from swarm.client.session import open_client
from swarm.run.invite import Invite

CALLS_PER_S: Final = 100
TIMEOUT_S: Final = 60.0


async def main(invite: str) -> None:
    opened = Invite.parse(invite)
    async with open_client(opened) as client:
        peer, rpc = client.manifest.authority, client.host.rpc

        async def measure(seconds: float) -> dict[str, float]:
            wall: list[float] = []
            failed = 0

            async def call(due: float) -> None:
                nonlocal failed
                try:
                    await rpc.call(peer, PING, Empty(), timeout_s=TIMEOUT_S)
                except BarnraiseError:
                    failed += 1
                wall.append(trio.current_time() - due)

            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for number in range(int(seconds * CALLS_PER_S)):
                    due = began + number / CALLS_PER_S
                    await trio.sleep_until(due)
                    nursery.start_soon(call, due)
            at = round(0.99 * (len(wall) - 1))
            return {"failed": failed, "p99_s": sorted(wall)[at]}

        await measure(0.5)
        sys.stdout.write(json.dumps({"ready": True}) + "\n")
        sys.stdout.flush()
        stdin = trio.lowlevel.FdStream(0)
        while line := await stdin.receive_some():
            sys.stdout.write(json.dumps(await measure(float(line))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
