"""What the averaging benchmark makes of its peers' reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.rounds.averaging import judge, ours_of
from benchmarks.rounds.averaging_data import float64_mean, save
from benchmarks.rounds.averaging_sizes import Size, summary
from benchmarks.rounds.size_rows import section

GROUP = [{"peer": "A"}, {"peer": "B"}, {"peer": "C"}]


def report(peer: str, seconds: dict[str, float], merged: dict[str, list[str]], hash: str | None) -> dict[str, Any]:
    figures = {"peer": peer, "seconds": seconds, "merged": merged, "members": 3, "cpu_s": 1.0, "wire_bytes": 30}
    return {**figures, "state_hash": "s", "hash": hash, "faults": [900, 300, 7, 9][: len(seconds)]}


def test_a_peer_that_was_late_with_a_round_does_not_spoil_the_figures(tmp_path: Path) -> None:
    full, short = ["A", "B", "C"], ["A", "B"]
    reports = [
        report(peer, {"1": 1.0, "2": 2.0 + late, "3": 4.0 + late}, {"1": full, "2": short, "3": full}, "h")
        for peer, late in (("A", 0.0), ("B", 0.5))
    ]
    reports.append(report("C", {"1": 1.5, "3": 5.0}, {"1": full}, None))
    figures = ours_of(reports, GROUP, 3, None, tmp_path)
    assert figures["faults"] == 7, "of the third round on; C was not there in all"
    quick = [{**one, "faults": one["faults"][:2]} for one in reports]
    assert ours_of(quick, GROUP, 3, None, tmp_path)["faults"] is None
    assert figures["seconds"] == [1.0, 2.5], "each round from the last commit to the last commit"
    assert figures["incomplete"] == 1 and figures["merged"] == [0, 1, 2] and figures["identical"]
    assert figures["files"] == [tmp_path / "ours-0", tmp_path / "ours-1"], "C was not there before the last round"


@pytest.mark.parametrize(("merged", "error"), [([0, 1], 0.0), ([0, 1, 2], 0.1)])
def test_the_result_is_compared_with_the_mean_of_those_that_were_merged(
    tmp_path: Path, merged: list[int], error: float
) -> None:
    save(float64_mean(range(2), 100).to(torch.float32), tmp_path / "ours-0")
    figures = {"files": [tmp_path / "ours-0"], "merged": merged, "seconds": [1.0]}
    judged = judge(figures, {"all": float64_mean(range(3), 100)}, peers=3, numel=100)
    assert judged["error_all"] >= error and (error or judged["error_all"] < 1e-6)


@pytest.mark.parametrize(
    ("times", "share", "identical", "passed", "said"),
    [
        ([2.0, 2.4, 3.0], 0.5, True, True, ("2.40 (2.3)", "0.50 (0.5)", "same bits: yes")),
        ([3.0, 2.2, 2.1], 0.5, True, False, ("**2.20** (2.3)", "0.50 (0.5)", "same bits: yes")),
        ([2.4, 2.4, 2.4], 0.6, True, False, ("2.40 (2.3)", "**0.60** (0.5)", "same bits: yes")),
        ([2.4, 2.4, 2.4], 0.4, False, False, ("2.40 (2.3)", "0.40 (0.5)", "same bits: **no**")),
    ],
)
def test_a_size_keeps_its_bars_by_the_medians_of_its_runs(
    times: list[float], share: float, identical: bool, passed: bool, said: tuple[str, ...]
) -> None:
    names = ("ours_s", "hivemind_s", "ours_cpu_s", "hivemind_cpu_s", "faults", "tcp_s", "memory_s")
    one = {**dict.fromkeys(names, 1.0), "cpu_share": share, "codec": "blockwise8"}
    runs = [{**one, "times": ratio, "identical": identical or number > 0} for number, ratio in enumerate(times)]
    row = summary(Size(4, 25_000_000, 8, 7, bar=2.3, cpu_bar=0.5), runs)
    assert row["name"] == "4 x 25M, 8 bits" and row["passed"] is passed
    page = section({"rows": [row]})
    assert all(words in page for words in said), page
