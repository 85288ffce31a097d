"""Scripted faults, in the manner of torchft: `BARNRAISE_FAULT=stop:before_vote:3` freezes this process at that point.

Only tests and the soak run set the variable. A fault that fires at an exact point of the protocol is worth a hundred
that fire at a random time, and cannot be aimed from outside the process.
"""

from __future__ import annotations

import os
import signal
from typing import Final

POINTS: Final = (
    "before_send",
    "during_exchange",
    "before_vote",
    "after_vote",
    "during_checkpoint",
    "during_state_transfer",  # at a donor; "round" 0: asked for the list of chunks, 1: for a chunk
    "during_fetch",  # at a joiner that has a part of the state
)
_SIGNALS: Final = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def _parse(spec: str) -> tuple[signal.Signals, str, int] | None:
    if not spec:
        return None
    action, point, round_number = spec.split(":")
    if action not in _SIGNALS or point not in POINTS:
        raise ValueError(f"BARNRAISE_FAULT={spec!r}: use (kill|stop):({'|'.join(POINTS)}):ROUND")
    return _SIGNALS[action], point, int(round_number)


_scripted = _parse(os.environ.get("BARNRAISE_FAULT", ""))


def reach(point: str, round_number: int) -> None:
    """Kill or freeze this process if the script says so; fires once, at the first round >= the scripted one."""
    global _scripted
    if _scripted is None:
        return
    fatal, at, first_round = _scripted
    if point == at and round_number >= first_round:
        _scripted = None
        os.kill(os.getpid(), fatal)
