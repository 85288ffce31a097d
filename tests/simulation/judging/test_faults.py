"""Each fault of the simulator does what it says, each weaker one is noticed, and all of them are drawn."""

from __future__ import annotations

from random import Random
from unittest.mock import patch

import pytest

from tests.simulation import faults, rare_faults
from tests.simulation.judging import machines  # noqa: F401  it adds its happenings
from tests.simulation.judging.happenings import HAPPENINGS
from tests.simulation.judging.weakenings import Weakening, weaker_faults
from tests.simulation.net import Network
from tests.simulation.setups import SETUPS
from tests.simulation.world import World

SEEDS = 10  # of each kind of group: drawing costs nothing
KINDS = [*faults._APPLY, *rare_faults.KINDS]
WEAKER = list(weaker_faults())


@pytest.mark.parametrize("name", HAPPENINGS)
def test_a_fault_happens(name: str) -> None:
    HAPPENINGS[name]()


def noticed_by(names: list[str]) -> str:
    """Return which of these happenings does not happen any more, "" if all do."""
    for name in names:
        try:
            HAPPENINGS[name]()
        except Exception:  # noqa: BLE001  however it fails, it notices
            return name
    return ""


@pytest.mark.parametrize("weaker", WEAKER, ids=lambda weaker: weaker.name)
def test_each_weaker_fault_is_noticed(weaker: Weakening) -> None:
    with weaker.applied():
        assert noticed_by(list(HAPPENINGS))


@pytest.mark.parametrize("kind", KINDS)
def test_a_fault_that_does_nothing_is_noticed(kind: str) -> None:
    table = rare_faults.KINDS if kind in rare_faults.KINDS else faults._APPLY
    with patch.dict(table, {kind: lambda *args: None}):
        assert noticed_by(list(HAPPENINGS))


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        (Network, "is_cut", lambda self, source, target: False),
        (Network, "has_parted", lambda self, source, target: False),
        (World, "reaches", lambda self, source, target: True),
    ],
)
def test_a_world_that_does_not_ask_for_faults_is_noticed(owner: type, name: str, value: object) -> None:
    with patch.object(owner, name, value):
        assert noticed_by(list(HAPPENINGS))


def test_each_kind_of_fault_is_drawn() -> None:
    drawn = {
        fault.kind + (f" {fault.args[1]}" if fault.kind in ("crash", "cut") else "")
        for setup in SETUPS.values()
        for seed in range(SEEDS)
        for fault in (*faults.draw(setup, Random(seed)), *rare_faults.draw(setup, seed))
    }
    crashes = {f"crash {kind}" for kind in ("kept", "unsynced", "prefix", "wiped")}
    assert drawn == {*KINDS, *crashes, "cut True", "cut False"} - {"crash", "cut"}
