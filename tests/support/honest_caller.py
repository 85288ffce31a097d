"""An honest peer of an open run that calls one peer a hundred times a second, in a process of its own.

    python -m tests.support.honest_caller INVITE

Each line of stdin is a number of seconds. The answer is one line of JSON: how long calls took, from the moment at which
they were due, and how many failed.
"""

from __future__ import annotations

import json
import sys
from typing import Final

import trio

from peer.errors import BarnraiseError
from peer.net.heartbeat import PING, Ping
from swarm.client.session import open_client
from swarm.run.invite import Invite

CALLS_PER_S: Final = 100
TIMEOUT_S: Final = 5.0


async def main(invite: str) -> None:
    opened = Invite.parse(invite)
    async with open_client(opened) as client:
        peer, rpc = client.manifest.authority, client.host.rpc

        async def measure(seconds: float) -> dict[str, float]:
            took: list[float] = []
            failed = 0

            async def call(due: float) -> None:
                nonlocal failed
                try:
                    await rpc.call(peer, PING, Ping(), timeout_s=TIMEOUT_S)
                except BarnraiseError:
                    failed += 1
                took.append(trio.current_time() - due)

            began = trio.current_time()
            async with trio.open_nursery() as nursery:
                for number in range(int(seconds * CALLS_PER_S)):
                    due = began + number / CALLS_PER_S
                    await trio.sleep_until(due)
                    nursery.start_soon(call, due)
            took.sort()
            last = len(took) - 1
            p50, p99 = took[last // 2], took[round(0.99 * last)]
            return {"calls": len(took), "failed": failed, "p50_s": p50, "p99_s": p99, "max_s": took[-1]}

        await measure(0.5)
        sys.stdout.write(json.dumps({"ready": True}) + "\n")
        sys.stdout.flush()
        stdin = trio.lowlevel.FdStream(0)
        while line := await stdin.receive_some():
            sys.stdout.write(json.dumps(await measure(float(line))) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    trio.run(main, sys.argv[1])
