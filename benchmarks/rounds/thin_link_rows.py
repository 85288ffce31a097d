"""The sums of the thin-link grid, and its section of RESULTS.md."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

from benchmarks.common.markdown import percent, table
from benchmarks.common.options import RESULTS

Figures = dict[str, Any]

STEPS: Final = (8, 32, 125, 500)
PUBLISHED: Final = "H = 32 at 50 Mbit/s, blocking and with fp32: 2.4 % of the time computing"
HEAD: Final = (
    *("Mbit/s", "method", "MB an exchange", "link alone, s", "exchange, s", "CPU, s"),
    *(f"H = {steps}" for steps in STEPS),
    "measured (computed)",
)
OFF_MAX: Final = 0.1
"""By which part a measured share may differ from the computed one."""
GPU_FLOPS: Final = 0.4 * 165e12
"""Of an RTX 4090: 165 TFLOP/s of bf16 products that add in fp32 by its data sheet, 40 % of them reached."""
STEP_TOKENS: Final = 16_384
"""Of an inner step: 8 sequences of 2,048 tokens."""
LOSS_GROUP: Final = "links"
LOSS_ROWS: Final = {  # of that group in convergence.json, by method of the grid
    "fp32": "fp32 H={steps}",
    "int8": "int8 H={steps}",
    "int4": "int4 H={steps}",
    "two_bit": "two_bit H={steps}",
    "streaming int4": "streaming H={steps}",
}
LOSS_STEPS: Final = {8: 8, 32: 32, 125: 120, 500: 480}
"""The H of the convergence test that stands for one of the grid."""


def loss_of(method: str, steps: int, file: Path = RESULTS / "convergence.json") -> float | None:
    """Return the held-out loss of that method and H, the mean of its seeds, if convergence.json has a cell of it and
    none has diverged."""
    if method not in LOSS_ROWS or not file.exists():
        return None
    groups = json.loads(file.read_text())["figures"].get("cells", {})
    seeds = groups.get(LOSS_GROUP, {}).get(LOSS_ROWS[method].format(steps=LOSS_STEPS[steps]), {})
    losses = [cell["loss"] for cell in seeds.values()]
    return fmean(losses) if losses and None not in losses else None


def step_seconds(params: int) -> float:
    """Return the seconds of an inner step on an RTX 4090 by arithmetic: 6 operations a parameter and token."""
    return 6.0 * params * STEP_TOKENS / GPU_FLOPS


def share(steps: int, step_s: float, exchange_s: float) -> float:
    """Return the share of the time in which a peer computes, when exchanges block."""
    return steps * step_s / (steps * step_s + exchange_s)


def seconds_on_link(size_bytes: float, mbit: float) -> float:
    """Return the least seconds in which a link carries that many bytes, each way."""
    return size_bytes * 8e-6 / mbit


def exchanges(reports: Sequence[Figures], rounds: Iterable[int], peers: int) -> list[float]:
    """Return, for each of the rounds that has merged all peers, the median peer's seconds from its last step to the
    first step of the next round. Rounds are numbers; reports name them by text, as JSON does."""
    found = []
    for number in rounds:
        name, after = str(number), str(number + 1)
        each = [
            report["trained"][after][0] - report["trained"][after][2] - report["trained"][name][0]
            for report in reports
            if _has(report, name) and _has(report, after)
        ]
        if each and any(len(report["merged"].get(name, ())) == peers for report in reports):
            found.append(median(each))
    return found


def commits(reports: Sequence[Figures], rounds: Iterable[int]) -> list[float]:
    """Return the median peer's seconds from its last step to its commit, for each of the rounds."""
    found = []
    for name in map(str, rounds):
        each = [r["seconds"][name] - r["trained"][name][0] for r in reports if name in r["seconds"] and _has(r, name)]
        found += [median(each)] if each else []
    return found


def measured_share(reports: Sequence[Figures], rounds: Sequence[int]) -> float | None:
    """Return the share of the time computing in consecutive rounds, of all peers together: from the end of the steps
    before them to the end of their own. None if a round is missing."""
    names = [str(number) for number in (rounds[0] - 1, *rounds)]
    whole = [report for report in reports if all(_has(report, name) for name in names)]
    if not whole:
        return None
    busy = sum(report["trained"][name][2] for report in whole for name in names[1:])
    return float(busy / sum(report["trained"][names[-1]][0] - report["trained"][names[0]][0] for report in whole))


def _has(report: Figures, name: str) -> bool:
    return name in report["trained"]


def is_off(cell: Figures) -> bool:
    """Return whether the share that was measured of a blocking method differs from the computed one."""
    found, stated = cell["measured"], cell["computed"]
    return found is None or abs(found / stated - 1) > OFF_MAX


def section(figures: Figures) -> str:
    """Return the share of the time computing of each link and method as a row."""
    return (
        f"{figures['peers']} peers with real sockets and the product's rounds, each in a network namespace behind tbf;"
        f" {figures['params']:,} parameters. An inner step takes {1e3 * figures['step_s']:.1f} ms, in which a stand-in"
        f" for the worker waits: {figures['step_words']}. All peers share this machine's cores: CPU is what those"
        " need at least for an exchange. MB are coded bytes that a peer sends, and receives as many.\n\n"
        "The exchange of a method that blocks lasts from the last step to the first one of the next round (encode,"
        " exchange, merge, step, hash, vote, commit, plan), whatever H is; the shares are H steps / (H steps +"
        " exchange). Beside them one H that was run whole, in other rounds; **bold** where its share is more than"
        f" {OFF_MAX:.0%} off. Streaming's exchange, to the commit, runs beside the steps; its shares are measured, with"
        f" {_fragments(figures)} fragments. In brackets the held-out loss of that method in the convergence test, where"
        " it has one; there H is 120 and 480 for the last two, and streaming has two fragments.\n\n"
        f"For comparison, the one published figure, of another model: {PUBLISHED}.\n\n"
        + table(HEAD, [row(cell, figures["step_s"]) for cell in figures["cells"]])
    )


def _fragments(figures: Figures) -> str:
    counts = sorted({cell["fragments"] for cell in figures["cells"] if cell["fragments"] > 1})
    return " or ".join(map(str, counts)) or "no"


def row(cell: Figures, step_s: float) -> list[str]:
    """Return the cells of one link and method."""
    streams = cell["fragments"] > 1
    shares = {cell["steps"]: cell["measured"]} if streams else {h: share(h, step_s, cell["exchange_s"]) for h in STEPS}
    whole = "" if streams else f"{_percent(cell['measured'])} ({_percent(cell['computed'])}) at H = {cell['steps']}"
    return [
        f"{cell['mbit']:,.0f}",
        cell["method"],
        f"{cell['coded_bytes'] / 1e6:.2f}",
        f"{seconds_on_link(cell['coded_bytes'], cell['mbit']):.2f}",
        f"{cell['exchange_s']:.2f}",
        f"{cell['cpu_s']:.2f}",
        *(_with_loss(shares.get(steps), loss_of(cell["method"], steps)) for steps in STEPS),
        f"**{whole}**" if whole and is_off(cell) else whole,
    ]


def _percent(value: float | None) -> str:
    return "-" if value is None else percent(value, 1)


def _with_loss(value: float | None, loss: float | None) -> str:
    if value is None:
        return ""
    return f"{_percent(value)} ({'-' if loss is None else f'{loss:.3f}'})"
