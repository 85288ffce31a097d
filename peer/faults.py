"""Scripted faults, as in torchft: `BARNRAISE_FAULT=stop:before_vote:3` freezes this process at that point.

This module carries out `kill` and `stop`. The caller carries out `drop` (do not answer), `garble` (send garbage) and
`move` (take another stage), where the point allows them. `BARNRAISE_FAULT=@FILE` reads scripts from a file, one a line,
whenever the file exists. Each script fires after the one before it, and its line is then removed. So a test can inject
faults again and again into a process that has run for long.

Only tests and the soak run set the variable. A fault at an exact point of the protocol cannot be aimed from outside the
process, and finds more than a hundred at random times.
"""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

ROUND_POINTS: Final = (
    "before_send",
    "during_exchange",
    "before_vote",
    "after_vote",
    "during_checkpoint",
    "during_state_transfer",  # at a donor; "round" 0: at a request for the list of chunks, 1: for a chunk
    "during_fetch",  # at a joiner that has a part of the state
)
STAGE_POINTS: Final = (
    # At a replica of a pipeline's stage; "round" is the number of micro-batches that have arrived.
    "pipeline_forward",  # before the forward (drop: it ends here)
    "pipeline_send",  # the hidden state is ready (garble)
    "pipeline_backward",  # the gradient has arrived
    "pipeline_answer",  # counted, before the answer (drop, garble)
    "at_replica",  # serving a stage (move: to the stage before)
    "leaving",  # a move is announced, and the old replica still serves
    "arriving",  # the new stage is chosen, and its state not fetched yet
)
POINTS: Final = ROUND_POINTS + STAGE_POINTS
CALL: Final = "call/"  # before a call of the method named after it is sent (garble its payload)
ANSWER: Final = "answer/"  # before a call of that method is answered (drop, garble the payload)

Script = Literal["", "drop", "garble", "move"]
_ACTIONS: Final[dict[str, signal.Signals | Script]] = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "drop": "drop",
    "garble": "garble",
    "move": "move",
}


@dataclass(frozen=True)
class _Fault:
    action: signal.Signals | Script
    point: str
    first_round: int


def _parse(spec: str) -> _Fault | None:
    if not spec:
        return None
    action, point, round_number = spec.split(":")
    if action not in _ACTIONS or not (point in POINTS or point.startswith((CALL, ANSWER))):
        raise ValueError(f"BARNRAISE_FAULT={spec!r}: use ({'|'.join(_ACTIONS)}):({'|'.join(POINTS)}):ROUND")
    return _Fault(_ACTIONS[action], point, int(round_number))


_spec = os.environ.get("BARNRAISE_FAULT", "")
_file = Path(_spec[1:]) if _spec.startswith("@") else None
_scripted = None if _file else _parse(_spec)


def reach(point: str, round_number: int = 0) -> Script:
    """Kill or freeze this process if the script says so, or return the action for the caller. Fires once, at the first
    round >= the scripted one."""
    global _scripted
    fault, rest = (_scripted, "") if _file is None else _next(_file)
    if fault is None or point != fault.point or round_number < fault.first_round:
        return ""
    _scripted = None
    if _file is not None:
        _leave(_file, rest)
    if not isinstance(fault.action, signal.Signals):
        return fault.action
    os.kill(os.getpid(), fault.action)
    return ""


def _next(file: Path) -> tuple[_Fault | None, str]:
    """Return the next script in the file, and the lines after it."""
    try:
        first, _, rest = file.read_text().partition("\n")
    except FileNotFoundError:
        return None, ""
    return _parse(first), rest


def _leave(file: Path, rest: str) -> None:
    """Write back the lines that have not fired, or remove the file if there are none."""
    if not rest.strip():
        file.unlink(missing_ok=True)
        return
    fresh = file.with_suffix(".new")
    fresh.write_text(rest)
    fresh.replace(file)
