"""The real core under random schedules of all kinds of groups, a determinism check, and the kept seeds."""

from __future__ import annotations

from collections import Counter
from functools import cache

import pytest
from blake3 import blake3

from swarm.protocol.agreement.coordination.group_watch import GroupWatch
from tests.simulation.campaign import Tally, run_campaign
from tests.simulation.invariants import Broken
from tests.simulation.machine import Machine
from tests.simulation.mutations.table import ALL, search, switched_off
from tests.simulation.seeds.shrink import kept, replay, shrink
from tests.simulation.setups import LARGE, SETUPS
from tests.simulation.tensors import GENESIS
from tests.simulation.world import World

SCHEDULES = 3  # of each kind of group; `.ci/run` has 3,000 others before these tests
FIRST_SEED = 10
EXCUSED_OF = 10  # schedules


@cache
def tally_of(setup: str) -> Tally:
    """Run the schedules of a kind of group; once, whoever asks."""
    return run_campaign(SCHEDULES, FIRST_SEED, 1, (setup,))[0]


@pytest.mark.parametrize("setup", SETUPS)
def test_random_schedules_hold(setup: str) -> None:
    tally = tally_of(setup)
    assert not tally.found and tally.ran[setup] == SCHEDULES
    assert tally.heads > 2 * SCHEDULES, "the group committed next to nothing: the schedules show nothing"


def test_of_few_of_them_nothing_is_promised() -> None:
    """Of all together: so few of one kind may all be of that sort by chance."""
    together = Tally()
    for setup in SETUPS:
        together.add(tally_of(setup))
    assert not together.excused_too_often, together.excused


def test_random_schedules_of_large_groups_hold() -> None:
    tally, _ = run_campaign(len(LARGE), FIRST_SEED, 1, tuple(LARGE))
    assert not tally.found and tally.heads > 2 * tally.schedules


def test_schedules_of_which_nothing_is_promised_are_counted_and_bounded() -> None:
    tally = run_campaign(EXCUSED_OF, FIRST_SEED, 1, ("required3-weights",))[0]
    assert 0 < tally.not_promised["required3-weights"] < tally.ran["required3-weights"] == EXCUSED_OF
    assert f"required3-weights {tally.not_promised.total()} of {EXCUSED_OF}" in tally.excused
    tally.not_promised["required3-weights"] = EXCUSED_OF
    assert tally.excused_too_often == ["required3-weights"]
    mixed = Tally(
        schedules=1000, ran=Counter(dict.fromkeys(SETUPS, 20)), not_promised=Counter(dict.fromkeys(SETUPS, 1))
    )
    assert mixed.excused_too_often == []
    mixed.not_promised = Counter(dict.fromkeys(SETUPS, 5))
    assert mixed.excused_too_often == ["all"]


@pytest.mark.parametrize(("name", "setup", "seed", "without"), kept())
def test_kept_seeds_hold(name: str, setup: str, seed: int, without: tuple[int, ...]) -> None:
    """These broke an invariant once."""
    assert replay(setup, seed, without)[0] == ""


NOTICED = (
    "nothing is said before the disk has it",
    "votes only for the own state's hash",
    "fetch first, then leave",
    "required: the coordinator's vote is needed",
    "a member is dropped after two absences",
    "newcomers are a minority",
    "what was not merged is free again",
)


@pytest.mark.parametrize("name", NOTICED)
def test_a_missing_rule_is_noticed(name: str) -> None:
    """Those that a few schedules notice; `python -m tests.simulation --mutations` looks for all."""
    rule = next(rule for rule in ALL if rule.name == name)
    assert search(rule, 40).found_after is not None


def test_each_rule_is_still_where_it_is_switched_off() -> None:
    for rule in ALL:
        with switched_off(rule):
            assert rule.setups and all(setup in SETUPS for setup in rule.setups), rule.name


@pytest.mark.parametrize("setup", ["witness4", "required3", "witness3-lying-joiner"])
def test_the_same_seed_gives_the_same_trace(setup: str) -> None:
    assert _trace(setup, 3) == _trace(setup, 3)
    assert _trace(setup, 3) != _trace(setup, 4)


def _trace(setup: str, seed: int) -> str:
    world = World(SETUPS[setup], seed, tracing=True)
    world.run()
    return blake3("\n".join(world.timeline).encode()).hexdigest()


def test_a_failing_schedule_shrinks_to_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Break an invariant by hand wherever the coordinator crashes: all other faults must go."""

    def crash(self: World, *args: object) -> None:
        raise Broken("test", "it crashed")

    monkeypatch.setattr(World, "crash", crash)
    seed = next(
        seed for seed in range(50) if len(World(SETUPS["witness3"], seed).faults) > 8 and replay("witness3", seed)[0]
    )
    found = shrink("witness3", seed)
    assert found is not None and found.what == "test: it crashed"
    assert len(World(SETUPS["witness3"], seed).faults) - len(found.without) == 1


def test_quiet_groups_commit_round_after_round() -> None:
    """Without faults there is a commit in each round, nobody is suspected for long, and nothing is lost."""
    world = World(SETUPS["witness3"], 1, without=range(1000))
    world.run()
    rounds = sorted(head.round for head in world.invariants.heads.values() if head.attempt >= 0)
    assert rounds == list(range(1, len(rounds) + 1)) and len(rounds) > 5
    assert {head.attempt for head in world.invariants.heads.values()} <= {-1, 0}
    assert GENESIS.hash in world.invariants.heads


def test_what_is_left_for_ever_is_judged_by_its_disks() -> None:
    worlds = [World(SETUPS["witness4-weights"], seed).run() for seed in range(30)]
    lefts = [world.liveness.left for world in worlds if world.liveness.left is not None]
    assert {left.hope for left in lefts} == {"alone", "operator", "lost", "open"}
    assert all(not world.covered["operator regroups"] for world in worlds if world.covered["left alone"])


def test_the_operator_who_is_not_told_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GroupWatch, "tell_lost", lambda self, reason: None)
    found = {replay("required3-weights", seed)[0].partition(":")[0] for seed in range(30)}
    assert "13 told" in found


def test_made_up_weights_of_an_honest_owner_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def result(self: World, machine: Machine, key: bytes, index: int) -> bytes:
        name = self.tensors.merge(key, index)
        self.tensors.forged.add(name)
        return name

    monkeypatch.setattr(World, "result", result)
    assert replay("witness4-forger", 1)[0].startswith("5 weights")
