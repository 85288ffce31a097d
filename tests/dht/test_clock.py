import pytest
from hypothesis import given
from hypothesis import strategies as st

from dht.clock import NEGLIGIBLE_S, SwarmClock


class Clocks:
    """A wall clock that is off, and a monotonic one."""

    def __init__(self, off_s: float) -> None:
        self.off_s = off_s
        self.time = 1000.0

    def make(self) -> SwarmClock:
        return SwarmClock(wall=lambda: self.time + self.off_s, monotonic=lambda: self.time)


def test_one_wrong_clock_among_right_ones_corrects_itself() -> None:
    clocks = Clocks(off_s=3600.0)
    clock = clocks.make()
    for peer in ("a", "b"):
        clock.observe(peer, clocks.time, 0.0)
    assert clock.now() == pytest.approx(clocks.time)
    assert clock.disagreement_s == pytest.approx(-3600.0)
    clocks.time += 77
    assert clock.now() == pytest.approx(clocks.time)


def test_one_wrong_clock_does_not_move_right_ones() -> None:
    clocks = Clocks(off_s=0.0)
    clock = clocks.make()
    clock.observe("right", clocks.time, 0.0)
    clock.observe("wrong", clocks.time + 1e9, 0.0)
    assert clock.now() == pytest.approx(clocks.time)


def test_with_one_other_clock_nothing_is_corrected_but_the_disagreement_shows() -> None:
    clocks = Clocks(off_s=60.0)
    clock = clocks.make()
    clock.observe("a", clocks.time, 0.0)
    assert clock.correction_s == 0.0
    assert clock.disagreement_s == pytest.approx(-60.0)


def test_a_step_of_the_own_clock_keeps_the_samples_good() -> None:
    clocks = Clocks(off_s=3600.0)
    clock = clocks.make()
    for peer in ("a", "b", "c"):
        clock.observe(peer, clocks.time, 0.0)
    clocks.off_s = 0.0  # NTP has caught up
    assert clock.correction_s == 0.0
    assert clock.now() == pytest.approx(clocks.time)


@given(st.lists(st.floats(-NEGLIGIBLE_S, NEGLIGIBLE_S), min_size=3, max_size=9), st.floats(-1e9, 1e9))
def test_a_minority_of_liars_cannot_move_the_time(honest: list[float], lie: float) -> None:
    clocks = Clocks(off_s=0.0)
    clock = clocks.make()
    for number, off_s in enumerate(honest):
        clock.observe(f"honest-{number}", clocks.time + off_s, 0.0)
    for number in range(len(honest) // 2):
        clock.observe(f"liar-{number}", clocks.time + lie, 0.0)
    assert abs(clock.now() - clocks.time) <= NEGLIGIBLE_S


def test_slow_answers_and_lost_peers_do_not_count() -> None:
    clocks = Clocks(off_s=0.0)
    clock = clocks.make()
    clock.observe("slow", clocks.time + 100, 30.0)
    assert clock.disagreement_s == 0.0
    clock.observe("lost", clocks.time + 100, 0.0)
    clock.forget("lost")
    assert clock.disagreement_s == 0.0
