"""The sections of RESULTS.md about rounds of several sizes, and on links of unequal speed."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.common.markdown import table

HEAD: Final = (
    "peers x values|runs|ours, s|hivemind, s|times as fast (bar)|CPU s a peer|hivemind|share (bar)|page faults"
)


def section(figures: dict[str, Any]) -> str:
    """Return the medians of each size as a row."""
    rows = [
        [
            row["name"],
            str(len(row["runs"])),
            f"{row['ours_s']:.3f}",
            f"{row['hivemind_s']:.3f}",
            judged(row["times"], row["bar"], row["bar"] is None or row["times"] >= row["bar"]),
            f"{row['ours_cpu_s']:.3f}",
            f"{row['hivemind_cpu_s']:.3f}",
            judged(row["cpu_share"], row["cpu_bar"], row["cpu_bar"] is None or row["cpu_share"] <= row["cpu_bar"]),
            f"{row['faults']:,.0f}",
            f"{row['tcp_s']:.3f} / {row['memory_s']:.3f}",
        ]
        for row in figures["rows"]
    ]
    agreed = "yes" if all(row["identical"] for row in figures["rows"]) else "**no**"
    return (
        table([*HEAD.split("|"), "TCP / memory, s"], rows)
        + "\n\nMedians of the runs, which went by turns. Page faults are a peer's in a round after the third. All peers"
        f" of each run have the same bits: {agreed}. The last column is the machine's limit for the same bytes."
    )


def judged(value: float, bar: float | None, passed: bool) -> str:
    """Return the figure and its bar; bold if it misses it."""
    if bar is None:
        return f"{value:.2f}"
    return f"{value:.2f} ({bar:g})" if passed else f"**{value:.2f}** ({bar:g})"


def by_link(figures: dict[str, Any]) -> str:
    """Return the seconds of an exchange on each network as a row."""
    rows = [
        [
            row["name"],
            f"{row['equal']['exchange_s']:.2f} ({row['limits']['equal_s']:.2f})",
            f"{row['by_link']['exchange_s']:.2f} ({row['limits']['by_link_s']:.2f})",
            judged(row["times"], row["bar"], row["times"] >= row["bar"]),
            " ".join(map(str, row["by_link"]["owned"])),
        ]
        for row in figures["rows"]
    ]
    head = ["links", "equal shares, s (limit)", "by link, s (limit)", "times as quick (bar)", "slices by peer"]
    return (
        f"{figures['params']:,} values at 8 bits. The limit is what the slowest link needs for its bytes; hivemind's"
        f" `load_balance_peers` finds the same one by link.\n\n{table(head, rows)}"
    )
