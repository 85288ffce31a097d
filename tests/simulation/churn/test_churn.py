"""Some minutes of churn: groups go on, people end what stands still, and all invariants hold at every step."""

from __future__ import annotations

import pytest

from swarm.protocol.agreement.config import Mode
from tests.simulation.churn import world
from tests.simulation.churn.measure import Availability, LongSchedule
from tests.simulation.churn.world import Churn

MODES: tuple[Mode, ...] = ("witness", "required")


def _measured(churn: Churn, seed: int, seconds: float) -> Availability:
    return LongSchedule(churn, seed).measure(seconds)


@pytest.mark.parametrize("mode", MODES)
def test_a_group_makes_progress_while_machines_fail(mode: Mode) -> None:
    found = _measured(Churn(3, mode, coordinator_down=0.01, disks_lost=0.2), 2, 1000.0)
    assert found.kept == sum(found.committed) > 80 and found.untold == 0


@pytest.mark.parametrize("mode", MODES)
def test_without_failures_a_round_takes_ten_seconds(mode: Mode) -> None:
    found = _measured(Churn(3, mode, coordinator_down=0.0, disks_lost=0.0, fails_s=1e12), 1, 600.0)
    assert found.committed in ((59,), (60,)) and (found.starts, found.calls) == (0, 0)


def test_the_operator_ends_what_the_coordinator_calls_for() -> None:
    churn = Churn(2, "witness", coordinator_down=0.0, disks_lost=1.0, operator_s=60.0)
    found = _measured(churn, 1, 2000.0)
    assert found.calls and found.starts and sum(found.committed) > 60


def test_a_run_that_no_disk_can_bring_back_begins_again_when_the_operator_says_so() -> None:
    """At its first weights, however old it is."""
    churn = Churn(1, "witness", coordinator_down=0.0, disks_lost=1.0, operator_s=60.0, fails_s=2900.0)
    found = _measured(churn, 2, 5000.0)
    assert found.undoing and not found.lost_runs and found.kept < sum(found.committed) > 256


def test_what_is_forgotten_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    churn = Churn(2, "required", coordinator_down=0.01, disks_lost=0.0)
    whole = _measured(churn, 1, 2000.0)
    monkeypatch.setattr(world, "HEADS_KEPT", 60)
    small = LongSchedule(churn, 1)
    assert small.measure(2000.0) == whole
    assert len(small.world.invariants.heads) < sum(whole.committed)
