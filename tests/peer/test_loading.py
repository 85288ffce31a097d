"""Phases of reading many bytes are told by a bounded number of events."""

from __future__ import annotations

from typing import Any

import pytest

from peer.catalogue.happening import Happening
from peer.loading import STEP_S, STEPS_MAX, Loading, loading


class Told:
    """What was emitted."""

    def __init__(self) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: Happening, /) -> None:
        self.events.append(event.stream_form())


@pytest.mark.parametrize("size_bytes", [1, 199, 1 << 34])
def test_progress_is_told_so_many_times_at_most(size_bytes: int) -> None:
    told, now = Told(), 0.0

    def clock() -> float:
        nonlocal now
        now += 10 * STEP_S
        return now

    read, piece = Loading(told, "read", size_bytes, clock), max(1, size_bytes // 5000)
    for _ in range(-(-size_bytes // piece)):
        read.add(piece)
    done = [fields["done_bytes"] for _, fields in told.events]
    assert 0 < len(done) <= STEPS_MAX and done == sorted(done) and done[-1] <= size_bytes


def test_progress_is_not_told_sooner_than_it_can_be_seen() -> None:
    told, times = Told(), iter([0.0, STEP_S / 2, STEP_S, 1.1 * STEP_S, 3 * STEP_S])
    read = Loading(told, "fetch", 100, lambda: next(times))
    for done in (10, 20, 30):
        read.reach(done)
    read.add(500)  # a parameter that several blocks share is counted again
    assert [(name, fields["done_bytes"]) for name, fields in told.events] == [
        ("loading_progress", 20),
        ("loading_progress", 100),
    ]


def test_a_phase_that_fails_has_no_end() -> None:
    told = Told()
    with loading(told, "check", 7):
        pass
    with pytest.raises(OSError), loading(told, "load", 8):
        raise OSError
    assert [(name, fields["phase"], fields["size_bytes"]) for name, fields in told.events] == [
        ("loading_begun", "check", 7),
        ("loading_ended", "check", 7),
        ("loading_begun", "load", 8),
    ]
