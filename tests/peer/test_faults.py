"""Scripts of faults fire at their point, once, in order."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAM = """
import sys
from peer.faults import reach
print([reach(point, int(number)) for point, number in (argument.split(":") for argument in sys.argv[1:])])
"""


def reached(script: str, *points: str) -> subprocess.CompletedProcess[str]:
    """Return the action at each point, "POINT:ROUND", for a process that reaches them in order."""
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, *points],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "BARNRAISE_FAULT": script},
    )


def told(script: str, *points: str) -> str:
    return reached(script, *points).stdout.strip()


def test_a_script_fires_once_at_the_first_round_it_names() -> None:
    points = ["before_vote:3", "pipeline_answer:1", "pipeline_answer:2", "pipeline_answer:3"]
    assert told("drop:pipeline_answer:2", *points) == "['', '', 'drop', '']"
    assert told("", *points) == "['', '', '', '']"


def test_a_process_is_killed() -> None:
    assert reached("kill:call/round.vote:0", "call/round.vote:0").returncode == -signal.SIGKILL


def test_a_file_holds_one_script_after_another(tmp_path: Path) -> None:
    file = tmp_path / "script"
    assert told(f"@{file}", "at_replica:0") == "['']"
    file.write_text("move:at_replica:0\ngarble:answer/state.chunk:0\n")
    assert told(f"@{file}", "answer/state.chunk:0", "at_replica:0", "at_replica:0") == "['', 'move', '']"
    assert file.read_text() == "garble:answer/state.chunk:0\n"
    assert told(f"@{file}", "answer/state.chunk:0", "answer/state.chunk:0") == "['garble', '']"
    assert not file.exists()


def test_an_invalid_script_is_refused() -> None:
    assert "use (kill|stop|drop|garble|move)" in reached("kill:nowhere:0").stderr
