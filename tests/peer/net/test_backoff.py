import trio
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from peer.net.backoff import PEERS_MAX, Backoff


def doubling() -> Backoff:
    return Backoff(1.0, 60.0, jitter=0.25, clock=lambda: 0.0)


@given(st.integers(1, 40))
def test_the_pause_doubles_up_to_its_cap(failures: int) -> None:
    now = 0.0
    backoff = Backoff(1.0, 60.0, jitter=0.25, clock=lambda: now)
    for _ in range(failures):
        backoff.failed("a")
    expected = min(2.0 ** (failures - 1), 60.0)
    assert 0.75 * expected <= backoff.next_try("a") <= 1.25 * expected
    assert backoff.paused("a")
    now = 1.25 * expected
    assert not backoff.paused("a") and "a" in backoff


def test_success_resets_and_a_cap_can_be_lowered() -> None:
    backoff = doubling()
    assert not backoff.paused("a")
    for _ in range(10):
        backoff.failed("a", max_s=5.0)
    assert backoff.next_try("a") <= 1.25 * 5.0
    backoff.reset("a")
    assert not backoff.paused("a") and "a" not in backoff


def test_the_oldest_name_is_forgotten() -> None:
    backoff = doubling()
    for number in range(PEERS_MAX + 1):
        backoff.failed(f"name-{number}")
    assert not backoff.paused("name-0")
    assert backoff.paused(f"name-{PEERS_MAX}")


async def test_a_cool_down_ends_after_its_time_or_by_reset(autojump_clock: trio.testing.MockClock) -> None:
    pause = Backoff(30.0, 30.0, factor=1)
    pause.failed("a")
    assert pause.paused("a") and not pause.paused("b")
    await trio.sleep(29)
    pause.failed("b")
    await trio.sleep(2)
    assert not pause.paused("a") and pause.paused("b")
    pause.reset("b")
    assert not pause.paused("b")


async def test_cool_downs_that_are_over_are_forgotten(autojump_clock: trio.testing.MockClock) -> None:
    pause = Backoff(30.0, 30.0, factor=1)
    for number in range(5000):
        pause.failed(str(number))
    assert len(pause) == 1024 and pause.paused("4999")
    await trio.sleep(31)
    pause.failed("last")
    assert len(pause) == 1
