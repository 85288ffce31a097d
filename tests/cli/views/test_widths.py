"""The live view as a person sees it in terminals of 40, 80 and 100 columns: `golden/NAME-COLUMNS.txt`.

To write them anew after a change that is meant: `GOLDEN=write pytest tests/cli/views/test_widths.py`; read the diff.
"""

from __future__ import annotations

import io
import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from cli.terminal import screen as screen_module
from cli.views.live import _drawn
from cli.views.progress import Progress
from tests.cli.support.seen_in import LINES, Terminal

GOLDEN = Path(__file__).parent / "golden"
TITLE = "run rv3ik7vjyndcycrf3zy5p2j7jtha3j5c   home /home/ann/.barnraise/rv3ik7vjyndc"


def whole() -> Progress:
    """Two peers with the whole model, one of which has skipped all steps of a round."""
    view = Progress(TITLE)
    for name, loss, skipped in (("ann-desktop", 2.5, 0), ("b", None, 100)):
        view.apply(name, "val_evaluated", 1.0, {"round": 0, "loss": 5.5 if loss else None})
        fields = {"round": 123, "members": 12, "state_hash": "abcdef0123", "steps": 100, "skipped": skipped}
        view.apply(name, "round_committed", 1.0, {**fields, "loss": loss, "bytes_up": 1.5e9, "bytes_down": 2e8})
    view.apply("b", "state_progress", 1.0, {"done_bytes": 1, "size_bytes": 4})
    return view


def pipeline() -> Progress:
    view = Progress(TITLE, stages=2)
    for stage in range(2):
        name = f"a peer with a long name {stage}"
        view.apply(name, "replica_opened", 1.0, {"stage": stage})
        fields = {"round": 123, "stage": stage, "members": 2, "state_hash": "abcdef0123", "loss": 2.5}
        view.apply(name, "round_committed", 1.0, fields)
        view.apply(name, "stage_load", 1.0, {"queue": 17.0, "rate": 123.4, "phase": "waiting for stage 0"})
    return view


def coordinator() -> Progress:
    view = Progress("coordinator   home /home/ann/run")
    view.apply("c", "run_entered", 1.0, {"name": "r", "role": "coordinator", "rounds": 9, "stages": 2})
    view.apply("c", "head_seen", 1.0, {"round": 123, "members": 12, "stage": 0})
    return view


@pytest.mark.parametrize("columns", [40, 80, 100])
@pytest.mark.parametrize("scene", [whole, pipeline, coordinator])
def test_the_live_view_fits(scene: Callable[[], Progress], columns: int) -> None:
    written = io.StringIO()
    console = screen_module._PlainConsole(
        file=written, width=columns, height=LINES, force_terminal=True, legacy_windows=False, markup=False, emoji=False
    )
    with screen_module.live(_drawn(scene(), columns), console):
        pass
    terminal = Terminal(columns)
    terminal.write(written.getvalue().replace("\n", "\r\n").encode())
    seen = "\n".join(row.rstrip() for row in terminal.rows).rstrip() + "\n"
    seen = re.sub(r"\d\d:\d\d:\d\d", "12:34:56", seen)
    golden = GOLDEN / f"{scene.__name__}-{columns}.txt"
    if os.environ.get("GOLDEN") == "write":
        golden.parent.mkdir(exist_ok=True)
        golden.write_text(seen)
    assert seen == golden.read_text()
    table = [line for line in seen.splitlines() if "123" in line and "committed" not in line]
    assert table and not [line for line in table if re.search(r"(^|[ │])…", line)], "a cell is cut to nothing"
