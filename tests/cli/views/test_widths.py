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

from cli.progress.progress import Progress
from cli.terminal import screen as screen_module
from cli.views.live import _drawn
from cli.views.table import live_view
from tests.cli.support.seen_in import LINES, Terminal

GOLDEN = Path(__file__).parent / "golden"
TITLE = "run rv3ik7vjyndcycrf3zy5p2j7jtha3j5c   home /home/ann/.barnraise/rv3ik7vjyndc"


def whole() -> Progress:
    """Two peers with the whole model, one of which has skipped all steps of a round."""
    view = Progress(TITLE)
    for name, loss, skipped in (("ann-desktop", 2.5, 0), ("b", None, 100)):
        view.apply(name, "val_evaluated", 1.0, {"round": 0, "loss": 5.5 if loss else None})
        fields = {"round": 123, "members": 12, "state_hash": "abcdef0123", "steps": 100, "skipped": skipped}
        view.apply(
            name, "round_committed", 1.0, {**fields, "loss": loss, "bytes_up": 1_500_000_000, "bytes_down": 200_000_000}
        )
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


def waiting() -> Progress:
    """One peer that waits for others."""
    view = Progress(TITLE)
    view.apply("ann", "run_entered", 1.0, {"name": "r", "role": "auto", "rounds": 500, "stages": 1, "min_peers": 3})
    view.apply("ann", "member_joined", 1.0, {"peer": "x", "name": "ann", "role": "full"})
    view.apply("ann", "member_joined", 1.0, {"peer": "y", "name": "coordinator", "role": "coordinator"})
    gpu = {
        "device": "NVIDIA RTX 4090",
        "memory_bytes": 25_300_000_000,
        "bf16": True,
        "sequences": 16,
        "recompute": "full",
    }
    view.apply("ann", "worker_ready", 1.0, gpu)
    return view


def training() -> Progress:
    """The same peer in the local steps of round 124."""
    view = waiting()
    for number in range(120, 124):
        fields = {"round": number, "members": 12, "state_hash": "abcdef0123", "loss": 3.0 - 0.01 * number}
        sent = {"bytes_up": 400_000_000 * number, "bytes_down": 300_000_000 * number, "tokens": number * 500_000_000}
        view.apply("ann", "round_committed", number * 3600.0, {**fields, **sent})
    view.apply("ann", "val_evaluated", 442800.0, {"round": 120, "loss": 1.7})
    view.apply("ann", "phase_entered", 442800.0, {"round": 124, "phase": "compute", "step": 61500, "steps": 500})
    for step in range(1, 124):
        fields = {"step": 61499 + step, "loss": 2.0 - step / 500, "tokens_per_s": 18_304.2}
        view.apply("ann", "inner_step", 442800.0 + 7 * step, fields)
    view.now = lambda: 442800.0 + 7 * 123
    return view


def coordinating() -> Progress:
    """The coordinator of a run that is not cut into stages, half an hour into a round."""
    view = Progress("coordinator   home /home/ann/run")
    view.apply("c", "run_entered", 1.0, {"name": "r", "role": "coordinator", "rounds": 500, "stages": 1})
    for number in range(120, 124):
        fields = {"round": number, "members": 12, "tokens": number * 500_000_000}
        view.apply("c", "head_seen", number * 3600.0, fields)
        said = {
            "round": number,
            "loss": 3.0 - 0.01 * number,
            "val_loss": 1.7,
            "val_round": 120,
            "peers": 12,
            "steps_per_s": 1.5,
            "bytes_up": 5_400_000_000_000,
            "bytes_down": 5_300_000_000_000,
        }
        view.apply("c", "members_told", number * 3600.0, said)
    view.now = lambda: 442800.0 + 1800
    return view


@pytest.mark.parametrize("columns", [40, 80, 100])
@pytest.mark.parametrize("scene", [whole, pipeline, coordinator, waiting, training, coordinating])
def test_the_live_view_fits(scene: Callable[[], Progress], columns: int) -> None:
    written = io.StringIO()
    console = screen_module._PlainConsole(
        file=written, width=columns, height=LINES, force_terminal=True, legacy_windows=False, markup=False, emoji=False
    )
    with screen_module.live(_drawn(scene(), columns, live_view), console):
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
    assert table or scene is waiting
    assert not [line for line in table if re.search(r"(^|  )…", line)], "a cell is cut to nothing"
