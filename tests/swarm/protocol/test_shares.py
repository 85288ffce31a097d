"""Shares of the merging by link: the least time, bounds, and what measurements of others come to."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from math import ceil, inf, isclose
from pathlib import Path
from typing import Final

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from swarm.protocol.shares import (
    CODE_MAX,
    SHARE_MAX,
    UNKNOWN,
    LinkSpeed,
    code_of,
    deal,
    divide,
    links_of,
    most_of,
    rate_of,
    room_code,
    seconds,
    weights_of,
)

MBIT: Final = 1e6 / 8  # bytes/s
UPDATE: Final = 25e6
CASES: Final = 1000
RECORD: Final = Path(__file__).with_name("hivemind_seconds.json")
"""The least time of each case by hivemind's solver."""
HIVEMIND: Final = """
import json, sys, warnings
warnings.simplefilter("ignore")
from hivemind.averaging.load_balancing import load_balance_peers
print(json.dumps([load_balance_peers(10**9, case) for case in json.load(sys.stdin)]))
"""


def alike(mbit: float, number: int) -> list[LinkSpeed]:
    return [LinkSpeed(mbit * MBIT, mbit * MBIT)] * number


def slowest(shares: list[float], links: list[LinkSpeed | None]) -> float:
    return max(seconds(a, link, len(links), UPDATE, UPDATE) for a, link in zip(shares, links, strict=True) if link)


def dealt(links: list[LinkSpeed | None], slices: int = 64) -> tuple[float, list[int]]:
    """Return how much quicker than equal shares the slices of a plan are, and the slices."""
    counts = deal(weights_of(links, UPDATE, UPDATE) or [1] * len(links), slices)
    equal = [1 / len(links)] * len(links)
    return slowest(equal, links) / slowest([count / slices for count in counts], links), counts


def drawn_rates() -> list[list[float]]:
    """Return what peers can send in Mbit/s, for each case; 0 for one that owns nothing."""
    draw = random.Random(7)
    return [
        [draw.choice([0.0, 1.0, 1.0, 1.0]) * 10 ** draw.uniform(0, 3) for _ in range(draw.randint(3, 24))] + [50.0]
        for _ in range(CASES)
    ]


def links_at(rates: list[float]) -> list[LinkSpeed | None]:
    return [LinkSpeed(rate * MBIT, rate * MBIT) if rate else None for rate in rates]


def test_the_least_time_is_that_of_hivemind() -> None:
    """Its solver is a linear program of one rate a peer. Shares need not be the same, since many may take the least
    time."""
    recorded = json.loads(RECORD.read_text())
    assert len(recorded) == CASES
    for rates, theirs in zip(drawn_rates(), recorded, strict=True):
        links = links_at(rates)
        ours = slowest(divide(links, UPDATE, UPDATE), links)
        assert isclose(ours, theirs, rel_tol=1e-4), (rates, ours, theirs)


@pytest.mark.soak  # importing hivemind takes 4 s of a processor, and its solver as much again
def test_the_recorded_times_are_those_of_hivemind() -> None:
    cases, recorded = drawn_rates(), json.loads(RECORD.read_text())
    run = subprocess.run(
        [sys.executable, "-c", HIVEMIND],
        input=json.dumps(cases),
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = json.loads(run.stdout.splitlines()[-1])
    assert len(found) == CASES
    times = [
        slowest([part / 1e9 for part in parts], links_at(rates)) for rates, parts in zip(cases, found, strict=True)
    ]
    assert times == pytest.approx(recorded, rel=1e-6)


def test_mixed_links_take_less_time() -> None:
    one_slow: list[LinkSpeed | None] = [*alike(100, 7), *alike(20, 1)]
    gain, counts = dealt(one_slow)
    assert gain >= 1.7 and counts[-1] == 0 and max(counts[:-1]) - min(counts[:-1]) <= 1
    homes: list[LinkSpeed | None] = [*[LinkSpeed(20 * MBIT, 200 * MBIT)] * 12, *alike(300, 4)]
    gain, counts = dealt(homes)
    assert gain >= 1.8 and counts == [0] * 12 + [16] * 4
    assert slowest(divide(one_slow, UPDATE, UPDATE), one_slow) == pytest.approx(10.0)  # its own update, at 20 Mbit/s


def test_equal_links_and_quick_exchanges_have_equal_shares() -> None:
    noisy = random.Random(3)
    links: list[LinkSpeed | None] = [LinkSpeed(100 * MBIT * noisy.uniform(0.85, 1.15)) for _ in range(8)]
    assert weights_of(links, UPDATE, UPDATE) == ()
    on_a_lan: list[LinkSpeed | None] = [*alike(10_000, 7), *alike(2_000, 1)]
    assert weights_of(on_a_lan, UPDATE, UPDATE) == ()
    assert weights_of([None, None], UPDATE, UPDATE) == () == weights_of(links, 0.0, 0.0)


def test_who_owns_nothing_takes_no_part_of_the_time() -> None:
    with_learner: list[LinkSpeed | None] = [*alike(100, 7), *alike(20, 1), None]
    weights = weights_of(with_learner, UPDATE, UPDATE)
    assert weights[-2:] == (0, 0) and set(weights[:-2]) == {SHARE_MAX}
    with pytest.raises(ValueError, match="owner"):
        divide([None], UPDATE, UPDATE)


@given(st.lists(st.integers(0, SHARE_MAX), min_size=1, max_size=64), st.integers(1, 512))
@example([0, 0, 0], 7)
@example([0, 0, 9], 64)
def test_no_member_gets_more_than_its_bound(weights: list[int], slices: int) -> None:
    counts = deal(weights, slices)
    owners = sum(weight > 0 for weight in weights) or len(weights)
    most = max(min(4 / len(weights), 0.5), 1 / owners)
    assert sum(counts) == slices and max(counts) <= ceil(slices * most)
    if any(weights):
        assert all(not count for count, weight in zip(counts, weights, strict=True) if not weight)
    for one, mine in zip(weights, counts, strict=True):
        for other, theirs in zip(weights, counts, strict=True):
            assert one < other or mine >= theirs - 1 or theirs > mine == ceil(slices * most_of(len(weights), owners))


def of_all(members: int, rate: float) -> dict[int, bytes]:
    link = bytes((code_of(rate), 0))
    return {by: link * by + UNKNOWN + link * (members - 1 - by) for by in range(members)}


def test_a_link_is_what_the_others_have_measured() -> None:
    links = links_of(of_all(4, 100 * MBIT), 4)
    assert links == [LinkSpeed(rate_of(code_of(100 * MBIT)), inf)] * 4
    told = of_all(4, 1e7)
    slow = {by: told[by][:6] + bytes((code_of(20 * MBIT), code_of(25 * MBIT))) for by in range(3)}
    assert links_of(slow, 4)[3] == LinkSpeed(rate_of(code_of(20 * MBIT)), rate_of(code_of(25 * MBIT)))
    assert links_of({}, 4) == [] == links_of({0: UNKNOWN * 4}, 4) == links_of({0: b"\xff\xff"}, 1)
    known = UNKNOWN + bytes((code_of(1e6), 0)) + UNKNOWN
    assert links_of({0: known, 2: known}, 3) == [LinkSpeed(rate_of(code_of(1e6)))] * 3, "who was not measured is usual"


@pytest.mark.parametrize(("members", "tellers"), [(3, 2), (4, 3), (9, 3)])
def test_a_link_counts_once_enough_have_measured_it(members: int, tellers: int) -> None:
    def told_by(few: int) -> list[LinkSpeed]:
        told = of_all(members, 1e6)
        for by in range(1, members):
            told[by] = (bytes((code_of(1e8), 0)) if by <= few else UNKNOWN) + told[by][2:]
        return links_of(told, members)

    usual = LinkSpeed(rate_of(code_of(1e6)))
    assert told_by(tellers) == [LinkSpeed(rate_of(code_of(1e8)))] + [usual] * (members - 1)
    assert told_by(tellers - 1) == [usual] * members


def test_who_has_little_memory_merges_no_more_than_it_can_hold() -> None:
    """A quick link would be given up to half of all updates."""
    assert room_code(8 * UPDATE, UPDATE, 9) == SHARE_MAX == room_code(inf, UPDATE, 9) == room_code(0.0, 0.0, 1)
    assert room_code(2 * UPDATE, UPDATE, 9) == ceil(SHARE_MAX / 4)
    assert room_code(0.0, UPDATE, 8) == ceil(SHARE_MAX / 8), "an equal share it has made room for"
    quick, slow = bytes((code_of(1e9), 0)), bytes((code_of(1e7), 0))
    measured = {by: (UNKNOWN if by == 0 else quick) + slow * 8 for by in range(9)}
    links = links_of(measured, 9)
    assert divide(links, UPDATE, UPDATE, most_of(9, 9))[0] == pytest.approx(4 / 9)
    measured[0] = bytes((room_code(2 * UPDATE, UPDATE, 9), 0)) + measured[0][2:]
    links = links_of(measured, 9)
    assert links[0].most == pytest.approx(0.25, abs=0.01)
    assert divide(links, UPDATE, UPDATE, most_of(9, 9))[0] <= links[0].most + 1e-9


def test_no_claim_of_its_own_counts_and_one_lie_moves_no_median() -> None:
    honest = of_all(8, 100 * MBIT)
    before = links_of(honest, 8)
    for lie in (bytes((CODE_MAX, CODE_MAX)), bytes((1, 1)), UNKNOWN):
        assert links_of({**honest, 7: lie * 7 + UNKNOWN}, 8) == before
    for claimed in (code_of(1e5 * MBIT), CODE_MAX):
        links = links_of({**honest, 7: honest[7][:14] + bytes((claimed, claimed))}, 8)
        assert links[7].most <= 1.0 and [replace(link, most=1.0) for link in links] == before
    assert links_of({**honest, 7: b"\xff"}, 8) == before, "words of another length say nothing of those they lack"


def test_rates_are_told_within_a_few_percent() -> None:
    for rate in (1e3, 2.5e6, 1.25e7, 1e9):
        assert rate_of(code_of(rate)) == pytest.approx(rate, rel=0.031)
    assert [code_of(rate) for rate in (0.0, -1.0, inf, float("nan"), 1.0, 1e30)] == [0, 0, 0, 0, 1, CODE_MAX]
