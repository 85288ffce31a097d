"""Members that lie about slices: the others go on and tell on the right one; and a check that is off is noticed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

import pytest

from optim.strategies.dense import DenseCoding
from peer.errors import ProtocolViolation
from swarm.protocol import plan
from swarm.protocol.agreement import work
from swarm.rounds.exchange import audits, round_slices
from swarm.rounds.exchange.round_slices import RoundSlices
from swarm.rounds.group_driver import GroupDriver
from tests.simulation.campaign import run_one, run_world
from tests.simulation.driven.lying_slices import SLICE_LIES, TOLD_ON
from tests.simulation.driven.world import DrivenWorld
from tests.simulation.setups import DRIVEN_LYING

LIES: Final = tuple(SLICE_LIES)
NO_FAULTS: Final = range(1000)  # these are left out
TOGETHER_S: Final = 4.0  # of rounds before the group is looked at
SEEDS: Final = 6  # at most: in one schedule all lies may be about slices that the liar owns


def calm_worlds(lie: str) -> Iterator[DrivenWorld]:
    """Return worlds with that lie and without faults, of the setups by turns."""
    setups = [replace(setup, faults_s=TOGETHER_S) for setup in DRIVEN_LYING.values()]
    for turn in range(SEEDS):
        index = LIES.index(lie)
        world = DrivenWorld(setups[(index + turn) % len(setups)], index + turn * len(LIES), NO_FAULTS)
        assert [liar.name for liar in world.liars.values()] == [lie]
        yield world


@pytest.mark.parametrize("lie", LIES)
def test_each_lie_is_told_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch, lie: str) -> None:
    monkeypatch.setattr(audits, "UNSHOWN_MAX", 1)  # without faults only a liar shows nothing
    told, told_on = 0, 0
    for world in calm_worlds(lie):
        assert run_world(world) == "" and len(world.invariants.heads) > 3
        told, told_on = told + world.covered[f"slice lie {lie}"], told_on + world.covered[f"told on {lie}"]
        if told and (told_on or lie not in TOLD_ON):
            break
    assert told > 0 and (told_on > 0) == (lie in TOLD_ON)


@pytest.mark.parametrize(("setup", "seed"), [(name, turn) for turn, name in enumerate(DRIVEN_LYING)])
def test_schedules_with_lies_hold(setup: str, seed: int) -> None:
    tally = run_one(setup, seed)
    assert not tally.found and tally.heads > 1


def _takes_any_bytes(slices: RoundSlices, bundles: Any, index: int, body: Any, data: memoryview, found: Any) -> None:
    name = slices.hash_of(bundles, index, body) or b""
    slices.received[index, body.member.peer] = round_slices.ReceivedSlice(name, data, 0.0)


def _any_count(*arguments: Any) -> None:
    with suppress(ProtocolViolation):
        plan.check_contribution(*arguments)


@pytest.mark.parametrize(
    ("lie", "target", "name", "broken", "found"),
    [
        ("OtherBytes", RoundSlices, "take", _takes_any_bytes, "15 liars are told on"),
        ("OtherLeaf", RoundSlices, "take", _takes_any_bytes, "15 liars are told on"),
        ("OtherNorm", round_slices, "SQNORM_CLOSE", 1e9, "15 liars are told on"),
        ("TooFew", work, "check_contribution", _any_count, "15 liars are told on"),
        ("LargeResult", DenseCoding, "check_result", lambda *arguments: None, "5 weights"),
        ("FalseOwner", GroupDriver, "leave_out", lambda *arguments: None, "15 liars are told on"),
    ],
)
def test_a_driver_that_does_not_check_slices_is_noticed(
    monkeypatch: pytest.MonkeyPatch, lie: str, target: object, name: str, broken: object, found: str
) -> None:
    monkeypatch.setattr(target, name, broken)
    assert any(run_world(world).startswith(found) for world in calm_worlds(lie))
