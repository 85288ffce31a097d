"""The real driver under random schedules; and what it may not do is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from swarm.rounds.building import StateBuilder
from swarm.rounds.records import RecordFiles
from swarm.state.outer_state import OuterState
from tests.simulation.campaign import run_one, run_world, world_of
from tests.simulation.setups import DRIVEN_HONEST

LOOKED_AT = 12  # schedules


@pytest.mark.parametrize("setup", DRIVEN_HONEST)
def test_schedules_of_the_driver_hold(setup: str) -> None:
    tally = run_one(setup, 1)
    assert not tally.found and tally.driven == 1
    assert tally.heads > 2, "the group committed next to nothing: the schedules show nothing"


def test_the_same_seed_gives_the_same_run_of_the_driver() -> None:
    worlds = [world_of("driven-witness4", seed) for seed in (3, 3, 4)]
    assert [run_world(world) for world in worlds] == ["", "", ""]
    first, again, other = (world.timeline for world in worlds)
    assert first == again != other and len(first) > 10


async def _saves_nothing(self: Any, state_hash: bytes) -> None:
    return


def _commits_other_weights(commit: Callable[..., None]) -> Callable[..., None]:
    def changed(self: OuterState, state_hash: bytes) -> None:
        commit(self, state_hash)
        with torch.no_grad():
            self.theta[0] += 1.0

    return changed


@pytest.mark.parametrize(
    ("target", "name", "broken", "invariant"),
    [
        (RecordFiles, "write", lambda self, records: None, "6 votes|7 durability"),
        (StateBuilder, "save", _saves_nothing, "7 durability"),
        (OuterState, "commit", _commits_other_weights(OuterState.commit), "5 weights|0 total"),
    ],
    ids=["records are not written", "results are not on disk before a vote", "weights are not those of the head"],
)
def test_a_driver_that_does_not_do_its_part_is_noticed(
    monkeypatch: pytest.MonkeyPatch, target: type, name: str, broken: object, invariant: str
) -> None:
    monkeypatch.setattr(target, name, broken)
    names = list(DRIVEN_HONEST)
    looked = (found.what for seed in range(LOOKED_AT) for found in run_one(names[seed % len(names)], seed).found)
    found = next(looked, "")
    assert found and found.partition(":")[0] in invariant.split("|"), found
