"""Messages and handlers of the tests of flows, and a host in a process of its own that answers each message."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import msgspec
import trio

from peer.events import EventLog
from peer.identity import Identity
from peer.net.flow.flow import Flow
from peer.net.host import open_host

PAYLOAD_MAX = 4 << 20


class Note(msgspec.Struct, frozen=True, array_like=True, tag=1):
    number: int
    text: str = ""


class Block(msgspec.Struct, frozen=True, array_like=True, tag=2):
    number: int


@dataclass
class Talk:
    """Keeps what comes over flows, and may answer it. Implements `FlowHandler`."""

    types: Any = Note | Block
    payload_max: int = PAYLOAD_MAX
    echo: bool = False
    got: list[tuple[Note | Block, bytes]] = field(default_factory=list)
    ended: list[str] = field(default_factory=list)
    stuck: trio.Event | None = None
    """Set it to let the handler go on."""
    changed: trio.Condition = field(default_factory=trio.Condition)

    async def on_message(self, flow: Flow, message: Any, payload: memoryview) -> None:
        if self.stuck is not None:
            await self.stuck.wait()
        self.got.append((message, bytes(payload)))
        if self.echo:
            flow.send(message, payload)
        async with self.changed:
            self.changed.notify_all()

    def on_end(self, flow: Flow, reason: str) -> None:
        self.ended.append(reason)

    async def until(self, count: int) -> None:
        """Wait until so many messages have come."""
        with trio.fail_after(300):
            async with self.changed:
                while len(self.got) < count:
                    await self.changed.wait()


async def main() -> None:
    async with open_host(identity=Identity.generate(), events=EventLog()) as host:
        host.flows.serve(Talk(echo=True))
        sys.stdout.write(host.addresses[0] + "\n")
        sys.stdout.flush()
        stdin = trio.lowlevel.FdStream(0)
        while await stdin.receive_some():
            pass


if __name__ == "__main__":
    trio.run(main)
