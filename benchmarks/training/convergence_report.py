"""The pages' part about convergence: tables of RESULTS.md and docs/run/methods.md, README's figure, the picture.

A row of the figures: seed -> cell, as `convergence.py` writes them.
"""

from __future__ import annotations

from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.common.markdown import number, table
from benchmarks.training.convergence_rows import ALONE, DATA_PARALLEL, TUNED
from benchmarks.training.liars import LIES

PICTURE = Path(__file__).with_name("convergence.png")
Cells = dict[str, dict[str, Any]]
NAMED = "DiLoCo H=30 two_bit, Muon, outer 1, .8"
"""The row whose bytes README gives."""
AT_BEST = "DiLoCo H=30 two_bit, Muon lr 0.004, outer 1, .8"
"""The same at a higher rate."""


def mean(row: Cells, key: str) -> float | None:
    """Return the mean over the seeds; None where one has diverged."""
    found = [cell[key] for cell in row.values()]
    return None if None in found else fmean(found)


def saves(row: Cells) -> float:
    """Return how many times fewer bytes a worker sends than with fp32 gradients of every step; 0 if it sends none."""
    cell = next(iter(row.values()))
    return float(cell["fp32_gradients"] / cell["sent"]) if cell["sent"] else 0.0


def a_token(row: Cells, key: str) -> str:
    """Return the payload bytes for each token of a worker and each million parameters."""
    cell = next(iter(row.values()))
    return (
        "-"
        if not cell[key]
        else number(cell[key] / cell["tokens"] / cell["parameters"] * 1e6, 0 if cell[key] > 1e8 else 1)
    )


def spread(row: Cells) -> str:
    losses = [cell["loss"] for cell in row.values() if cell["loss"] is not None]
    return f"{stdev(losses):.4f}" if len(losses) > 1 else "-"


def gap(row: Cells, other: Cells | None) -> str:
    """Return the loss above that of `other`, over the seeds that both have."""
    pairs = [(cell, other[seed]) for seed, cell in row.items() if seed in other] if other else []
    if not pairs or any(None in (a["loss"], b["loss"]) for a, b in pairs):
        return "-"
    return f"{fmean(a['loss'] - b['loss'] for a, b in pairs):+.4f}"


def loss_rows(rows: dict[str, Cells], cells: dict[str, dict[str, Cells]]) -> list[list[str]]:
    """Return the lines of a table, the lowest loss first; those that diverged last."""
    methods = cells.get("methods", {})
    lines = []
    for name, row in sorted(rows.items(), key=lambda item: mean(item[1], "loss") or 9e9):
        loss, right = mean(row, "loss"), mean(row, "cloze")
        lines.append(
            [
                name,
                "diverged" if loss is None else number(loss, 4),
                spread(row),
                gap(row, methods.get(DATA_PARALLEL)),
                gap(row, methods.get(TUNED)),
                "-" if right is None else f"{100 * right:.1f} %",
                a_token(row, "sent"),
                a_token(row, "received"),
                "-" if name == ALONE or not saves(row) else f"{saves(row):.0f}x",
                str(len(row)),
            ]
        )
    return lines


COLUMNS = [
    "row", "loss", "spread", "to data parallel", "to it tuned", "cloze", "B up", "B down", "fewer bytes up", "seeds",
]  # fmt: skip


def section(figures: dict[str, Any]) -> str:
    """Return the section of RESULTS.md."""
    cells = figures["cells"]
    before = fmean(figures["before"].values())
    parts = [
        f"8 workers, 480 steps each from a warm model of loss {before:.4f} (the mean of the seeds), AdamW at lr 1e-3,"
        " a cosine, unless the row says otherwise. Loss: nats a byte on held-out text, the mean of the seeds, and their"
        ' standard deviation. "to data parallel": above fp32 data parallel with AdamW at the same rate, and at its best'
        " rate. Cloze: of 1,000 tasks of four choices; chance is 25 %. B: payload bytes that a worker sends (gets) for"
        " each of its tokens and a million parameters. Picture: `benchmarks/training/convergence.png`."
    ]
    for group, title in (
        ("methods", "Methods and inner optimizers."),
        ("codecs", "Codecs: DiLoCo of 20 steps with AdamW; the other way is int8."),
        ("rates", "The search for data parallel's rate."),
        ("links", "The cells of the grid of thin links."),
    ):
        if group in cells:
            parts.append(f"{title}\n\n{table(COLUMNS, loss_rows(cells[group], cells))}")
    if "liars" in cells:
        parts.append(f"Merge rules with liars among 8, int8, one seed: the loss.\n\n{liars(cells['liars'])}")
    return "\n\n".join(parts)


def liars(rows: dict[str, Cells]) -> str:
    """Return the losses of each merge rule by the number of liars and their lie."""
    rules = list(dict.fromkeys(name.split(", ")[0] for name in rows))
    cases = ["honest", *(f"{count} {lie}" for lie in LIES for count in (1, 2, 3))]

    def shown(rule: str, case: str) -> str:
        row = rows.get(f"{rule}, {case}")
        loss = mean(row, "loss") if row else None
        return ("diverged" if row else "-") if loss is None else number(loss, 4)

    return table(["liars", *rules], [[case, *(shown(rule, case) for rule in rules)] for case in cases])


def guide(figures: dict[str, Any]) -> str:
    """Return the table of docs/run/methods.md: loss and bytes of each row."""
    cells = figures["cells"]
    shown = (0, 1, 3, 4, 5, 6, 7, 8, 9)  # not the spread
    lines = [[line[i] for i in shown] for line in loss_rows(cells["methods"], cells)]
    return table([COLUMNS[i] for i in shown], lines)


def sentence(figures: dict[str, Any]) -> str:
    """Return the row of README's table of numbers."""
    cells = figures["cells"]["methods"]
    row = cells[NAMED]
    same, best = gap(row, cells[DATA_PARALLEL]), gap(cells[AT_BEST], cells[TUNED])
    return (
        "| bytes that a worker sends, against fp32 data parallel: rounds of 30 inner steps of Muon at two bits |"
        f" {saves(row):.0f} times fewer; held-out loss {same} at the same rate, {best} at the best"
        f" (seeds: {len(row)}) |"
    )


def draw(figures: dict[str, Any], file: Path = PICTURE) -> None:
    """Draw each method's loss over its bytes, from a sixth of its steps to the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = {name: row for name, row in figures["cells"]["methods"].items() if mean(row, "loss") is not None}
    figure, axes = pyplot.subplots(figsize=(12, 8))
    colours = pyplot.get_cmap("tab20")
    sending = sorted(
        (name for name in rows if name != ALONE and saves(rows[name])), key=lambda name: mean(rows[name], "loss") or 0.0
    )
    for place, name in enumerate(sending, start=1):
        curves = [cell["curve"] for cell in rows[name].values()]
        megabytes = [point[1] / 1e6 for point in curves[0]]
        losses = [fmean(point[2] for point in points) for points in zip(*curves, strict=True)]
        label = f"{place:2}  {name}: {losses[-1]:.3f}, {saves(rows[name]):.0f}x fewer bytes"
        colour, style = colours((place - 1) % 20), "-" if place <= 20 else "--"
        axes.plot(megabytes, losses, style, color=colour, linewidth=1.3, alpha=0.8)
        axes.plot(megabytes[-1:], losses[-1:], "o", color=colour, markersize=7, label=label)
        axes.annotate(f"{place}", (megabytes[-1], losses[-1]), xytext=(5, -9), textcoords="offset points", fontsize=9)
    if ALONE in rows:
        axes.axhline(mean(rows[ALONE], "loss") or 0.0, linestyle=":", color="grey", label=f"     {ALONE}")
    axes.set(xscale="log", xlabel="MB sent by each worker", ylabel="held-out loss, nats a byte")
    axes.set_title("Loss against wire bytes, 8 workers; the dot is the end of training")
    axes.grid(alpha=0.25)
    axes.legend(fontsize=8.5, loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False)
    figure.tight_layout()
    figure.savefig(file, dpi=110)
