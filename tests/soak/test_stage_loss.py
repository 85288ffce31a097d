"""All replicas of a stage die at once: the run pauses, a peer of another stage takes it from a kept commit, and the run
goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli.children import children
from cli.course import Course
from cli.progress import Progress
from tests.cli.test_pipeline import RUN

pytestmark = [pytest.mark.soak, pytest.mark.process]

ROUNDS = 1000  # more than this test sees


def test_a_stage_that_lost_all_replicas_is_restored(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(RUN.replace("rounds = 12", f"rounds = {ROUNDS}"))
    progress = Progress("test", keeps_all=True, stages=2)
    with children() as group:
        course = Course(tmp_path, ROUNDS, group, progress, lambda: None)
        course.begin()
        started = [course.join(number) for number in range(1, 5)]
        course.wait(180, "both stages have committed three rounds", lambda: progress.round >= 3)
        kept = [child for child in started if progress.row(child.name).stage == 0]
        lost = [child for child in started if child not in kept]
        course.wait(60, "the last stage is kept by the first", lambda: all(_keeps(tmp_path / c.name) for c in kept))
        for victim in lost:
            course.kill(victim)
        course.wait(120, "a peer moves", lambda: bool(progress.moves))
        (move,) = progress.moves
        assert (move.source, move.target, move.reason) == (0, 1, "nobody serves it")
        course.wait(120, "rounds go on", course.rounds_from_now(3))
        books = progress.accounts
        assert sum(totals.of("completed") for totals in books.totals.values()) > 0
        assert len(progress.moves) == 1, "one peer moved, and the other stayed"


def _keeps(home: Path) -> bool:
    return any((home / "stage-1" / "checkpoints").glob("*-round-*"))
