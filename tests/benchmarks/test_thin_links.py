"""The sums of the thin-link grid and of a whole outer step, and the stand-in for a worker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import trio
import trio.testing

from benchmarks.common.paced_worker import PacedWorker, PlannedSchedule
from benchmarks.rounds.averaging_peer import SCHEDULE
from benchmarks.rounds.outer_step import largest, phases_of
from benchmarks.rounds.size_rows import PARTS, outer_step, outer_step_sum
from benchmarks.rounds.thin_link_rows import (
    LOSS_ROWS,
    commits,
    exchanges,
    is_off,
    loss_of,
    measured_share,
    section,
    share,
    step_seconds,
)
from benchmarks.rounds.thin_links import METHODS, coded_bytes
from peer.ipc.inner_options import InnerRunOptions
from swarm.protocol.head import genesis

OPTIONS = InnerRunOptions()


def report(ends: dict[int, float], exchange_s: float, steps_s: float, merged: int = 2) -> dict[str, Any]:
    """Return a peer's report as it comes out of JSON: `ends` of the steps of each round."""
    return {
        "trained": {str(number): [at, 8, steps_s] for number, at in ends.items()},
        "seconds": {str(number): at + exchange_s for number, at in ends.items()},
        "merged": {str(number): ["peer"] * merged for number in ends},
    }


def test_the_share_is_what_the_steps_take_of_a_round() -> None:
    assert share(32, 0.01, 0.32) == pytest.approx(0.5)
    assert share(8, 0.01, 0.32) == pytest.approx(0.2)
    assert step_seconds(25_000_000) == pytest.approx(0.03724, rel=1e-3)


def test_an_exchange_lasts_from_the_last_step_to_the_next_first_one() -> None:
    """Rounds of 2 s of steps, then 3 s to the commit and 1 s more to the next plan; one peer lacks the last round."""
    reports = [report({1: 0.0, 2: 6.0, 3: 12.0}, 3.0, 2.0), report({1: 0.5, 2: 6.5}, 3.0, 2.0)]
    assert exchanges(reports, [1, 2], 2) == pytest.approx([4.0, 4.0])
    assert commits(reports, [1, 2, 3]) == pytest.approx([3.0] * 3)
    assert measured_share(reports, [2, 3]) == pytest.approx(2 / 6)
    assert measured_share(reports, [3, 4]) is None
    assert exchanges(reports, [3], 2) == [], "the round after it is missing"
    assert exchanges(reports, [1], 3) == [], "it has merged two of three"


@pytest.mark.parametrize("name", [method.name for method in METHODS])
def test_every_method_can_name_its_loss(name: str, tmp_path: Path) -> None:
    file = tmp_path / "convergence.json"
    assert loss_of(name, 32, file) is None, "no such file"
    ends = ((120, 1.7), (480, None))
    cells = {LOSS_ROWS[name].format(steps=h): {"0": {"loss": 1.5}, "1": {"loss": last}} for h, last in ends}
    file.write_text(json.dumps({"figures": {"cells": {"links": cells}}}))
    assert loss_of(name, 125, file) == pytest.approx(1.6), "the mean of the seeds"
    assert loss_of(name, 500, file) is None, "one has diverged"
    assert loss_of(name, 8, file) is None, "no such row"
    file.write_text(json.dumps({"figures": {"rows": []}}))
    assert loss_of(name, 125, file) is None


def test_coded_bytes_are_those_of_slices_and_results() -> None:
    values = 4_000_000
    assert coded_bytes("fp32", values, 4) == pytest.approx(1.5 * 4 * values, rel=0.01)
    assert coded_bytes("int8/int4", values, 2) == pytest.approx(0.5 * values * (1 + 0.515), rel=0.01)
    assert coded_bytes("fp32", values, 4, fragments=5) == pytest.approx(1.5 * 4 * values / 5, rel=0.01)


def grid(**changes: Any) -> dict[str, Any]:
    cell = {
        "method": "int4",
        "mbit": 50.0,
        "steps": 32,
        "fragments": 1,
        "coded_bytes": 10e6,
        "exchange_s": 2.0,
        "cpu_s": 0.5,
        "measured": 0.333,
        "computed": 1 / 3,
    }
    settings = {"peers": 4, "params": 25_000_000, "step_s": 1 / 32, "step_words": "as set"}
    return {**settings, "cells": [cell | changes]}


def test_the_page_has_a_share_for_each_h_and_marks_sums_that_do_not_hold() -> None:
    page = section(grid())
    assert "| 50 | int4 | 10.00 | 1.60 | 2.00 | 0.50 | 11.1 % (" in page and "| 33.3 % (" in page
    assert "| 33.3 % (33.3 %) at H = 32 |" in page and "2.4 %" in page
    assert "| **20.0 % (33.3 %) at H = 32** |" in section(grid(measured=0.2))
    assert is_off(grid(measured=None)["cells"][0])


def test_streaming_has_only_the_shares_that_were_measured() -> None:
    page = section(grid(method="with no loss", fragments=5, steps=125, measured=0.9))
    assert "|  |  | 90.0 % (-) |  |  |" in page and "5 fragments" in page


# -- a whole outer step ------------------------------------------------------------------------------------------------


def outer_report(late_s: float) -> dict[str, Any]:
    phases = {"compute": 0.0, "submit": 1.0 + late_s, "exchange": 2.0, "vote": 5.0 - late_s}
    return {
        "phases": {name: {"2": at} for name, at in phases.items()},
        "seconds": {"2": 6.0},
        "parts_s": {"1": dict.fromkeys(PARTS, 1.0), "2": dict.fromkeys(PARTS, 1.5 + late_s)},
    }


def test_the_phases_of_a_step_add_up_to_all_of_it() -> None:
    found = phases_of([outer_report(0.0), outer_report(0.5)], [2])
    assert [found[name] for name in ("encode", "roster", "exchange", "commit")] == [1.5, 0.5, 3.0, 1.0]
    assert found["merge_part"] == 1.0, "of the slowest peer"


def test_the_sum_for_a_billion_scales_all_but_the_roster_and_is_not_below_the_link() -> None:
    seconds = {"encode": 1.0, "roster": 0.5, "exchange": 3.0, "commit": 1.0} | {f"{part}_part": 1.0 for part in PARTS}
    figures = {"peers": 4, "params": 100_000_000, "codec": "int4", "state": "disk", "rounds": 3, "identical": True}
    figures |= {"seconds": seconds, "coded_bytes": 75e6, "own_bytes": 8e8, "peak_bytes": 24e8, "cpu_s": 2.0}
    sums = outer_step_sum(figures)
    assert sums["loopback"]["all"] == pytest.approx(50.5)
    assert sums["50 Mbit/s"]["exchange"] == pytest.approx(120) and sums["50 Mbit/s"]["all"] == pytest.approx(140.5)
    assert sums["1,000 Mbit/s"]["exchange"] == pytest.approx(30)
    page = outer_step(figures)
    assert "| all | 5.50 | 50.50 | 140.50 |" in page and "8.0 and 24.0 bytes a parameter" in page


def test_the_largest_model_fits_in_memory_and_on_disk() -> None:
    assert largest(20_000_000_000, 10**12, 4, "disk") == 430_000_000
    assert largest(20_000_000_000, 20_000_000_000, 4, "disk") == 130_000_000
    assert largest(20_000_000_000, 10**12, 4, "memory") == 120_000_000
    assert largest(0, 0, 4, "disk") == 10_000_000


# -- the stand-in for a worker -----------------------------------------------------------------------------------------


async def test_a_stand_in_takes_the_time_of_its_steps(autojump_clock: trio.testing.MockClock) -> None:
    worker, began = PacedWorker(torch.ones(3), step_s=0.5), trio.current_time()
    result = await worker.inner_steps([(0, 10)], 0, 1e9, 4, options=OPTIONS)
    assert (result.steps, result.seconds, trio.current_time() - began) == (4, 2.0, 2.0)
    assert (await worker.inner_steps([(0, 3)], 0, 1e9, None, options=OPTIONS)).steps == 3, "a step has one sample"
    assert (await worker.inner_steps([(0, 9)], 0, 1.2, 9, options=OPTIONS)).steps == 3, "until the deadline"


@pytest.mark.parametrize(("after_steps", "at_s", "made"), [(0, 1.2, 3), (5, 1.2, 5), (20, 1.2, 10)])
async def test_a_stopped_stand_in_ends_its_step(
    after_steps: int, at_s: float, made: int, autojump_clock: trio.testing.MockClock
) -> None:
    worker, began = PacedWorker(torch.ones(3), step_s=0.5), trio.current_time()

    async def stop() -> None:
        await trio.sleep(at_s)
        worker.stop_inner(after_steps)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(stop)
        result = await worker.inner_steps([(0, 10)], 0, 1e9, None, options=OPTIONS)
    assert (result.steps, trio.current_time() - began) == (made, made * 0.5)
    await trio.sleep(1.0)  # of the virtual clock: the idle time that is measured
    assert (await worker.inner_steps([(0, 1)], 0, 1e9, None, options=OPTIONS)).idle_s == 1.0


def test_a_planned_schedule_has_the_steps_of_each_round() -> None:
    schedule = PlannedSchedule(SCHEDULE.outer, SCHEDULE.inner, 8, 60.0, planned=(8, 32))
    head = genesis("run", bytes(32))
    steps = [schedule.steps(msgspec.structs.replace(head, round=number)) for number in range(4)]
    assert steps == [8, 32, 32, 32], "round 0 is before the first"
