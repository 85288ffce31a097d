"""`peer` whose block server misbehaves towards clients, as BARNRAISE_BAD_SERVER says: modes parted by commas, one a
session in turn. It claims to be quick. Everything else is the real thing."""

from __future__ import annotations

import itertools
import os
from typing import Any, Final, cast

import msgspec
import trio

from cli.main import main
from swarm.inference.messages import SessionStarted, TokenDrawn
from swarm.serving.description import ServerDescription
from swarm.serving.served_session import ServedSession
from swarm.serving.server import BlockServer

VARIABLE: Final = "BARNRAISE_BAD_SERVER"
MODES: Final = ("value", "not_finite", "gap", "mute", "late", "have", "token", "position", "neighbour")
LATE_S: Final = 1.0


def misbehave(modes: list[str]) -> None:
    """Make the block server of this process such."""
    turns = itertools.cycle(modes)
    compute, started, init = BlockServer._compute, ServedSession.tell_started, ServedSession.__init__
    describe = ServerDescription.record

    def begin(self: Any, *args: Any) -> None:
        init(self, *args)
        self.mode = next(turns)

    def tell_started(self: Any) -> None:
        if self.mode == "have":
            self.tell(SessionStarted(self.id, self.start.revision, 1 << 24))
        else:
            started(self)
        if self.mode == "neighbour":
            self.tell_lost()

    async def misguided(self: Any, session: Any, message: Any, payload: bytes) -> None:
        if session.mode in ("value", "not_finite", "gap"):
            session.refuse(session.mode, "it says so")
        elif session.mode == "token":
            session.tell(TokenDrawn(session.id, session.start.revision, session.known, (1 << 24) - 1))
        elif session.mode == "position":
            session.tell(TokenDrawn(session.id, session.start.revision, 1 << 24, 1))
        elif session.mode != "mute":
            if session.mode == "late":
                await trio.sleep(LATE_S)
            await compute(self, session, message, payload)

    def claim(self: Any, *args: Any) -> Any:
        return msgspec.structs.replace(describe(self, *args), step_ms=0.001)

    server, served, description = cast(Any, BlockServer), cast(Any, ServedSession), cast(Any, ServerDescription)
    server._compute, served.tell_started, served.__init__, description.record = misguided, tell_started, begin, claim


if __name__ == "__main__":
    misbehave(os.environ[VARIABLE].split(","))
    main()
