"""The source's window on paths with one bottleneck: wide enough to fill it, and not much wider."""

from __future__ import annotations

import heapq
from itertools import count

import pytest

from swarm.pipeline.window import MARGIN, Mark, Window

LEAST = 3


def through(window: Window, answers: int, narrow_s: float, rest_s: float, device: bool) -> tuple[float, list[int]]:
    """So many answers over a path with a place that takes `narrow_s` for each, one after another, and `rest_s` for all
    else; waiting before it is known as such if it is a `device`, not if it is a link. The rate of the second half, and
    the sizes seen there."""
    under_way: list[tuple[float, int, Mark, float]] = []
    numbers = count()
    now = free_at = half_s = 0.0
    sizes = []
    for number in range(answers):
        while len(under_way) < window.size:
            free_at = max(free_at, now) + narrow_s
            waited_s = free_at - narrow_s - now
            answer_s = waited_s + narrow_s + rest_s
            unqueued_s = answer_s - (waited_s if device else 0.0)
            heapq.heappush(under_way, (now + answer_s, next(numbers), window.begun(now), unqueued_s))
        now, _, mark, unqueued_s = heapq.heappop(under_way)
        window.answered(mark, now, unqueued_s)
        if number == answers // 2:
            half_s = now
        if number > answers // 2:
            sizes.append(window.size)
    return len(sizes) / (now - half_s), sizes


@pytest.mark.parametrize("device", [True, False])
@pytest.mark.parametrize("rest_s", [0.0, 0.3, 2.0])
def test_bottleneck_is_busy_without_a_queue(device: bool, rest_s: float) -> None:
    window = Window(LEAST, 64)
    rate, sizes = through(window, 4000, 0.1, rest_s, device)
    needed = (0.1 + rest_s) / 0.1
    assert rate > 0.98 / 0.1
    assert max(sizes) <= MARGIN * max(LEAST, needed) + 2


def test_window_stays_stable() -> None:
    """Every micro-batch waits for the link behind others of ours; that must not look like a longer path."""
    window = Window(LEAST, 64)
    rate, sizes = through(window, 5000, 0.1, 0.3, device=False)
    assert rate > 0.98 / 0.1
    assert max(sizes) <= MARGIN * 4 + 2


def test_window_is_bounded() -> None:
    window = Window(3, 8)
    assert window.size == 3
    window.answered(window.begun(1.0), 1.0, 0.0)
    assert window.size == 3
    through(window, 50, 0.01, 5.0, device=True)
    assert window.size == 8
