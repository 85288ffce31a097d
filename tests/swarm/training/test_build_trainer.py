"""What a seat reads from the records of others."""

from __future__ import annotations

import pytest

from swarm.training.build_trainer import first_round
from tests.swarm.placement.test_stage_choice import NOW, record


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [((), None), ((-1,), None), ((4,), 4), ((3, 4), 3), ((4, 4, 3), 4), ((4, 10**9), 4), ((-1, 4, 10**9), 4)],
)
def test_one_record_does_not_say_that_a_round_is_over(rounds: tuple[int, ...], expected: int | None) -> None:
    """Whatever the replicas of other stages say, and those on their way to the first."""
    others = {"later": record(1, round=99), "feeder": record(0, round=99, role="feeder")}
    others |= {f"arriving {k}": record(0, round=-1, ready_at=NOW + 60) for k in range(4)}
    said = others | {str(k): record(0, round=number) for k, number in enumerate(rounds)}
    assert first_round(said, NOW) == expected
