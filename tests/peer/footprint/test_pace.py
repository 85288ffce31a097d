"""The pace of rounds, against the arithmetic of the outer loop's limits."""

from __future__ import annotations

from dataclasses import replace

import pytest

from peer.footprint.pace import WAITING, Pace
from peer.footprint.workload import ExchangeSize

BILLION = 1_000_000_000
TOKENS = 131_072
INT8 = ExchangeSize(state_vectors=2, up=8 / 8, result=8 / 8, peers=16)


def pace(exchange: ExchangeSize = INT8, flops: float = 66e12, link: float = 100e6, steps: int = 134) -> Pace:
    return Pace(exchange, BILLION, 6 * BILLION * TOKENS / flops, steps, TOKENS, link)


def test_an_exchange_of_a_billion_parameters_takes_what_the_link_takes() -> None:
    assert pace().exchange_s == pytest.approx(150)  # 1.9 GB at 100 Mbit/s
    assert pace(link=1e9).exchange_s == pytest.approx(15)


def test_the_steps_that_keep_waiting_small() -> None:
    """An RTX 4090 of many peers needs 134 steps of 131 k tokens at 100 Mbit/s."""
    many = pace(replace(INT8, peers=10**6))
    assert many.steps_wanted == pytest.approx(134, abs=1)
    assert replace(many, steps=many.steps_wanted).waiting_share <= WAITING
    assert replace(many, steps=many.steps_wanted - 1).waiting_share > WAITING
    assert many.rounds_a_day == pytest.approx(49, abs=1)


def test_an_exchange_that_lasts_while_steps_go_on_costs_what_is_left_of_it() -> None:
    """With 1 step of 12 s hidden in each of two halves, 24 s of 150 are."""
    streaming = pace(replace(INT8, fragments=2, overlap_steps=1))
    assert streaming.exchange_s == pytest.approx(150)
    assert streaming.waiting_s == pytest.approx(150 - 2 * streaming.step_s)
    eager = pace(replace(INT8, overlap_steps=float("inf")))
    assert eager.waiting_s == 0 and eager.steps_wanted < pace().steps_wanted


def test_days_follow_from_rounds() -> None:
    found = pace()
    assert found.days(found.tokens_a_day) == 1
    assert found.tokens_a_day == pytest.approx(16 * 134 * TOKENS * 86400 / (134 * found.step_s + 150), rel=1e-6)
