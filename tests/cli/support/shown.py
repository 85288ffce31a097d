"""Runs commands and views one after the other, so that their imports are paid for once: `shown.py < JSON`.

Each action is {"command": [...]}, {"events": path} (a live view of that stream), {"status": fields of MonitorState},
{"finding": [...]} (of the doctor) or {"error": text}.
"""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from cli.checks.machine import Finding
from cli.commands.doctor import _show as show_finding
from cli.main import main
from cli.progress.event_tail import EventTail
from cli.progress.progress import Progress
from cli.readings import print_state
from cli.run import report_failure
from cli.views.live import read_tails, shown
from peer.errors import NetworkError
from swarm.status.state import MonitorState


def view(path: str, as_json: bool) -> None:
    """Show a stream of events to its end."""
    progress, tails = Progress("a run"), {path: EventTail(Path(path))}
    with shown(progress, as_json) as redraw:
        read_tails(progress, tails, as_json)
        redraw()


def act(action: dict[str, Any]) -> None:
    match action:
        case {"command": arguments}:
            sys.argv = ["peer", *arguments]
            with suppress(SystemExit):
                main()
        case {"events": path}:
            view(path, action.get("json", False))
        case {"status": fields}:
            seen = msgspec.convert(fields, MonitorState)
            print_state(seen, as_json=False, guests=True)
            print_state(seen, as_json=True)
        case {"finding": fields}:
            show_finding(Finding(*fields))
        case {"error": text}:
            report_failure(NetworkError(text))
            report_failure(RuntimeError(text))


if __name__ == "__main__":
    for each in json.load(sys.stdin):
        act(each)
        sys.stderr.flush()
        sys.stdout.write("<next>")
        sys.stdout.flush()
