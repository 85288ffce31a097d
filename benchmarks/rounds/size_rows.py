"""The sections of RESULTS.md about rounds of several sizes, on links of unequal speed, and of one large model."""

from __future__ import annotations

from typing import Any, Final

from benchmarks.common.markdown import table, yes
from benchmarks.rounds.thin_link_rows import seconds_on_link

HEAD: Final = (
    "peers x values|runs|ours, s|hivemind, s|times as fast (bar)|CPU s a peer|hivemind|share (bar)|page faults"
)

PHASES: Final = {
    "encode": ("compute", "submit"),
    "roster": ("submit", "exchange"),
    "exchange": ("exchange", "vote"),
    "commit": ("vote", "commit"),
}
"""Of an outer step, one after the other: where each begins and ends."""
PARTS: Final = ("encode", "merge", "step", "hash")
"""Seconds of threads: "encode" in the phase of that name, the others in the exchange."""
BILLION: Final = 1_000_000_000
MBIT: Final = (50.0, 200.0, 1000.0)


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


def outer_step_sum(figures: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the seconds of an outer step of 1 B parameters, by phase and part and for "all": unshaped, and by link. On
    a link the exchange lasts as long as here, or as its bytes, if those take longer."""
    times = BILLION / figures["params"]
    scaled = {name: seconds * (1 if name == "roster" else times) for name, seconds in figures["seconds"].items()}
    sums = {"loopback": scaled}
    for mbit in MBIT:
        link_s = seconds_on_link(figures["coded_bytes"] * times, mbit)
        sums[f"{mbit:,.0f} Mbit/s"] = scaled | {"exchange": max(scaled["exchange"], link_s)}
    return {name: column | {"all": sum(column[phase] for phase in PHASES)} for name, column in sums.items()}


def outer_step(figures: dict[str, Any]) -> str:
    """Return the seconds of each phase as a row, beside the sums for 1 B parameters."""
    sums, here = outer_step_sum(figures), figures["seconds"]
    rows = [[name, *(f"{column[name]:.2f}" for column in (here, *sums.values()))] for name in PHASES]
    rows += [[f"({part})", *(f"({column[f'{part}_part']:.2f})" for column in (here, *sums.values()))] for part in PARTS]
    total = sum(here[phase] for phase in PHASES)
    rows.append(["all", f"{total:.2f}", *(f"{column['all']:.2f}" for column in sums.values())])
    own, peak = (figures[name] for name in ("own_bytes", "peak_bytes"))
    return (
        f"{figures['peers']} peers, {figures['params']:,} parameters, updates in {figures['codec']}, states in"
        f" {figures['state']}."
        f" Median of {figures['rounds']} rounds, of the slowest peer; all share this machine's cores. In brackets:"
        " seconds of threads, which overlap; merge, step and hash are in the exchange. A peer sends"
        f" {figures['coded_bytes'] / 1e6:.1f} MB and needs {figures['cpu_s']:.2f} s of CPU. Peak memory a process:"
        f" {own / 1e9:.2f} GB, {peak / 1e9:.2f} GB with mapped files ({own / figures['params']:.1f} and"
        f" {peak / figures['params']:.1f} bytes a parameter). All peers have the same bits:"
        f" {yes(figures['identical'])}. The sums for 1 B parameters scale the seconds, but for the roster's; on a link"
        " the exchange lasts at least as long as its bytes.\n\n"
        + table(["seconds", "measured", *(f"sum for 1 B, {name}" for name in sums)], rows)
    )
