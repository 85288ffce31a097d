from hypothesis import given
from hypothesis import strategies as st

from dht.backoff import NAMES_MAX, Backoff


@given(st.integers(1, 40))
def test_the_delay_doubles_up_to_its_cap(failures: int) -> None:
    backoff = Backoff(1.0, 60.0)
    for _ in range(failures):
        backoff.failed("a", now=0.0)
    expected = min(2.0 ** (failures - 1), 60.0)
    assert 0.75 * expected <= backoff.next_try("a") <= 1.25 * expected
    assert not backoff.due("a", 0.0)
    assert backoff.due("a", 1.25 * expected)


def test_success_resets_and_a_cap_can_be_lowered() -> None:
    backoff = Backoff(1.0, 60.0)
    assert backoff.due("a", 0.0)
    for _ in range(10):
        backoff.failed("a", now=0.0, max_s=5.0)
    assert backoff.next_try("a") <= 1.25 * 5.0
    backoff.reset("a")
    assert backoff.due("a", 0.0)


def test_it_is_bounded() -> None:
    backoff = Backoff(1.0, 60.0)
    for number in range(NAMES_MAX + 1):
        backoff.failed(f"name-{number}", now=0.0)
    assert backoff.due("name-0", 0.0)  # the oldest is forgotten
    assert not backoff.due(f"name-{NAMES_MAX}", 0.0)
