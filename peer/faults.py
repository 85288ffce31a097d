"""Scripted faults, in the manner of torchft: `BARNRAISE_FAULT=stop:before_vote:3` freezes this process at that point.

`kill` and `stop` are done here. `drop` (do not answer) and `garble` (send garbage) are for the caller to do, where the
point says so.

Only tests and the soak run set the variable. A fault that fires at an exact point of the protocol is worth a hundred
that fire at a random time, and cannot be aimed from outside the process.
"""

from __future__ import annotations

import os
import signal
from typing import Final, Literal

POINTS: Final = (
    "before_send",
    "during_exchange",
    "before_vote",
    "after_vote",
    "during_checkpoint",
    "during_state_transfer",  # at a donor; "round" 0: asked for the list of chunks, 1: for a chunk
    "during_fetch",  # at a joiner that has a part of the state
    # At a replica of a pipeline's stage; "round": how many micro-batches have come to it.
    "pipeline_forward",  # before the forward
    "pipeline_send",  # the hidden state is ready (garble)
    "pipeline_backward",  # the gradient is here
    "pipeline_answer",  # counted, before the answer (drop, garble)
)
Script = Literal["", "drop", "garble"]
_ACTIONS: Final[dict[str, signal.Signals | Script]] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "drop": "drop",
    "garble": "garble",
}


def _parse(spec: str) -> tuple[signal.Signals | Script, str, int] | None:
    if not spec:
        return None
    action, point, round_number = spec.split(":")
    if action not in _ACTIONS or point not in POINTS:
        raise ValueError(f"BARNRAISE_FAULT={spec!r}: use ({'|'.join(_ACTIONS)}):({'|'.join(POINTS)}):ROUND")
    return _ACTIONS[action], point, int(round_number)


_scripted = _parse(os.environ.get("BARNRAISE_FAULT", ""))


def reach(point: str, round_number: int) -> Script:
    """Kill or freeze this process if the script says so, or return what else it says; fires once, at the first round
    >= the scripted one."""
    global _scripted
    if _scripted is None:
        return ""
    action, at, first_round = _scripted
    if point != at or round_number < first_round:
        return ""
    _scripted = None
    if not isinstance(action, signal.Signals):
        return action
    os.kill(os.getpid(), action)
    return ""
