"""One of four real peers lies within the limits of the gate: what its lies do to the loss, by merge rule.

The problem is a quadratic: each honest peer's delta leads a part of the way to a common target, plus noise of its own.
The liar's delta is as long as the gate allows without a clip, and all of it is in one hundredth of the coordinates,
away from the target.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from optim.algorithms.outer_step import DilocoOuter
from optim.config import DilocoConfig
from optim.merge import NormGate
from optim.rules.interface import MergeRule
from optim.rules.registry import build_rule
from swarm.protocol.plan import Assignment
from tests.swarm.support.driven_group import DrivenReplica, GroupSetting, open_driven_group
from tests.swarm.support.group import Deltas

pytestmark = pytest.mark.slow
Answer = Callable[[torch.Tensor, str, int], torch.Tensor]
NUMEL, ROUNDS = 20_000, 8
HELD = NUMEL // 100  # coordinates that the liar pushes
PLAIN = DilocoOuter(1.0, 0.0, False)  # the state moves by the merged delta
TARGET = torch.zeros(NUMEL)


def honest(theta: torch.Tensor, peer: str, first_step: int) -> torch.Tensor:
    seed = sum(peer.encode()) * 1000 + first_step
    noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed))
    return 0.3 * (theta - TARGET) + 0.1 * noise


def lie(theta: torch.Tensor, peer: str, first_step: int) -> torch.Tensor:
    delta = torch.zeros(NUMEL)
    delta[:HELD] = -1.0
    longest = 0.97 * NormGate().norm_clip * honest(theta, peer, first_step).norm()
    return delta * (longest / delta.norm())


def unmoved(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
    return torch.zeros(NUMEL)


def deltas_of(
    member: DrivenReplica, first: torch.Tensor, answer: Callable[[torch.Tensor, str, int], torch.Tensor]
) -> Deltas:
    """Return a member's deltas, which depend on the weights that it stands at. `first`: those of round 0."""

    def deltas(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
        theta = member.trainer.theta
        return answer(first if theta is None else theta, peer, first_step)

    return deltas


async def losses(folder: Path, rule: MergeRule, liars: int) -> tuple[float, float]:
    """Return the loss after eight rounds that merge all four (a slow machine has others between them), a value's mean
    squared distance from the target: of all values, and of those that a liar pushes."""
    setting = GroupSetting(numel=NUMEL, codec="fp32", min_peers=4, outer=PLAIN, rule=rule)
    async with open_driven_group(folder, setting) as group:
        for number in range(4):
            member = await group.enter(unmoved)
            member.trainer.deltas = deltas_of(member, group.theta, lie if number < liars else honest)
        one = group.members[0]
        await group.until(lambda: sum(len(bodies or ()) == 4 for bodies in one.merged) == ROUNDS)
        squares = (one.state.theta - TARGET).square()
        await group.until_round(one.head.round)
        group.check()  # the liar breaks no rule
        return float(squares.mean()), float(squares[:HELD].mean())


_MEAN = list[tuple[float, float]]()
"""The losses with the mean: without a liar, and with one."""


@pytest.mark.parametrize("merge", ["median", pytest.param("trimmed_mean", marks=pytest.mark.soak), "flag"])
async def test_a_liar_within_the_gate_pulls_the_mean_and_not_the_rule(tmp_path: Path, merge: Any) -> None:
    kept, kept_there = await losses(tmp_path / "robust", build_rule(DilocoConfig(steps=4, merge=merge)), liars=1)
    if not _MEAN:  # the same for every rule
        mean = build_rule(DilocoConfig(steps=4))
        _MEAN.extend([await losses(tmp_path / "peace", mean, liars=0), await losses(tmp_path / "mean", mean, liars=1)])
    (_, peace_there), (pulled, pulled_there) = _MEAN
    assert pulled_there > 20 * peace_there
    assert kept_there < pulled_there / 10
    assert kept < pulled / 2
