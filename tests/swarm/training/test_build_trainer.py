"""What a replica reads from the records of others."""

from __future__ import annotations

import pytest

from swarm.training.build_trainer import first_round
from tests.swarm.placement.test_stage_choice import NOW, record


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [((), None), ((-1,), None), ((4,), 4), ((3, 4), 3), ((4, 4, 3), 4), ((4, 10**9), 4), ((-1, 4, 10**9), 4)],
)
def test_a_round_is_over_when_most_of_the_first_stage_say_so(rounds: tuple[int, ...], expected: int | None) -> None:
    """Replicas of other stages, and those on their way to the first, do not count."""
    others = {"later": record(1, round=99), "feeder": record(0, round=99, role="feeder")}
    others |= {f"arriving {k}": record(0, round=-1, ready_at=NOW + 60) for k in range(4)}
    said = others | {str(k): record(0, round=number) for k, number in enumerate(rounds)}
    assert first_round(said, NOW) == expected
