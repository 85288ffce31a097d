"""The check by loss: what it calls harmful, and how outcomes add up."""

from __future__ import annotations

from math import inf, nan

import pytest

from swarm.protocol.loss_check import WAY, Judgements, LossCheck, ways

BEFORE = (3.0, 3.2, 2.9, 3.1)


def after(*gains: float) -> list[float]:
    return [start - gain for start, gain in zip(BEFORE, gains, strict=True)]


OWN = after(0.10, 0.11, 0.09, 0.10)


@pytest.mark.parametrize(
    ("other", "is_harmful"),
    [
        (after(0.10, 0.09, 0.11, 0.10), False),
        (after(0.04, 0.03, 0.05, 0.04), False),  # a slow or unlucky peer
        (after(-0.10, -0.11, -0.09, -0.10), True),  # a flipped sign
        (after(0.001, -0.002, 0.0, 0.001), True),  # noise
        (after(0.3, -0.3, 0.2, -0.25), None),  # noise, not clearly: it takes no earlier outcome back
        (after(0.3, -0.1, 0.2, -0.05), False),  # as much as is asked for, though not clearly
        ([nan] * 4, True),
        ([3.0, inf, 3.0, 3.0], True),
    ],
)
def test_an_update_is_harmful_if_it_clearly_gains_much_less_than_ones_own(
    other: list[float], is_harmful: bool | None
) -> None:
    assert LossCheck(BEFORE, OWN, other).is_harmful is is_harmful


def test_one_batch_says_nothing() -> None:
    assert LossCheck([3.0], [2.9], [3.1]).is_harmful is None


def test_less_is_expected_of_fewer_steps() -> None:
    little = after(0.015, 0.014, 0.016, 0.015)
    assert LossCheck(BEFORE, OWN, little).is_harmful and not LossCheck(BEFORE, OWN, little, work=0.2).is_harmful
    assert LossCheck(BEFORE, OWN, after(0.0, 0.001, -0.001, 0.0), work=0.2).is_harmful
    assert LossCheck(BEFORE, OWN, after(0.008, 0.007, 0.009, 0.008), work=0.2).is_harmful, "by the root of the steps"


def test_no_more_is_expected_of_more_steps() -> None:
    assert LossCheck(BEFORE, OWN, after(0.04, 0.03, 0.05, 0.04), work=4.0).is_harmful is False


def test_no_update_is_made_longer() -> None:
    assert ways(2.0, 1.0) == (WAY / 2, WAY) and ways(1.0, 4.0) == (WAY, WAY / 4)


@pytest.mark.parametrize("own", [after(0.1, -0.1, 0.1, -0.1), after(-0.1, -0.1, -0.11, -0.1), [nan] * 4])
def test_a_judge_whose_own_update_does_not_clearly_help_says_nothing(own: list[float]) -> None:
    assert LossCheck(BEFORE, own, after(-1.0, -1.1, -0.9, -1.0)).is_harmful is None


def test_a_peer_is_left_out_after_two_harmful_updates_and_comes_back_with_good_ones() -> None:
    judgements = Judgements()
    judgements.note("P", False)
    judgements.note("P", True)
    assert judgements.suspects == {"P"} and not judgements.left_out
    judgements.note("P", True)
    judgements.note("P", True)
    assert judgements.left_out == {"P"}
    judgements.note("P", False)
    assert judgements.suspects == {"P"} and not judgements.left_out
    judgements.note("P", False)
    assert not judgements.suspects
