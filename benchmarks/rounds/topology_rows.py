"""The section of RESULTS.md about how updates travel between the peers of a round."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.common.markdown import table

PARTS: Final = ("loopback", "even", "uneven", "simulated")

Figures = dict[str, Any]

FORMULAS: Final = {  # of the bytes that all peers send, and that the busiest one sends and receives
    "server": ("2(n-1) M", "(n-1) M"),
    "naive": ("n(n-1) M", "(n-1) M"),
    "ring": ("2(n-1) M", "2(n-1)/n M"),
    "halving": ("2(n-1) M", "2(n-1)/n M; for n above a power of two p: 2(p-1)/p M + M"),
    "butterfly": ("2(n-1) M", "2(n-1)/n M"),
    "by link": ("2(n-1) M", "M + (n-2) a M"),
}


def section(figures: Figures) -> str:
    """Return the bytes and the seconds of each topology as a row, then the simulated seconds by the number of peers."""
    sizes = dict.fromkeys(row["peers"] for row in figures.get("loopback", ()))
    head = [
        "topology",
        "all send",
        "the busiest sends, and receives",
        f"measured beside that, n = {', '.join(map(str, sizes))}",
        "8 peers, even links: s (simulated)",
        "one of 8 slow: s (simulated)",
    ]
    rows = [
        [
            name,
            *stated,
            _off([row for row in figures.get("loopback", ()) if row["topology"] == name], figures["off_max"]),
            *(_seconds(figures.get(part, ()), name) for part in ("even", "uneven")),
        ]
        for name, stated in FORMULAS.items()
    ]
    planned = max((abs(row["plan_off"]) for part in PARTS for row in figures.get(part, ())), default=0.0)
    return (
        f"M: the bytes of an update ({figures['mbytes']:g} MB); a: the largest share that a peer owns. Measured: bytes"
        " that a host of the product sends and receives in calls, framing included; of the peer furthest off the"
        f" formula (bar {figures['off_max']:.0%}). The plans alone are off by {planned:.2%} at most, also for 64 peers."
        f" All sums exact: {_exact(figures)}. Links carry {figures['mbit']:g} Mbit/s each way, a slow one a fifth."
        f" Medians of {figures['runs']} runs; all peers share this machine's cores. Simulated: what the links alone"
        ' take. "by link" has the shares that the product\'s rule gives for the rates of the links; its bytes are'
        " measured with the shares for one slow link in eight, one at least.\n\n"
        + table(head, rows)
        + "\n\n"
        + _simulated(figures.get("simulated", ()))
    )


def _off(rows: Sequence[Figures], most: float) -> str:
    if not rows:
        return "-"
    low, high = (f(row["off"] for row in rows) for f in (min, max))
    text = f"{low:+.2%} to {high:+.2%}"
    return text if max(abs(low), abs(high)) <= most else f"**{text}**"


def _seconds(rows: Sequence[Figures], name: str) -> str:
    return next((f"{row['seconds']:.2f} ({row['ideal_s']:.2f})" for row in rows if row["topology"] == name), "-")


def _exact(figures: Figures) -> str:
    return "yes" if all(row["exact"] for part in PARTS[:3] for row in figures.get(part, ())) else "**no**"


def _simulated(rows: Sequence[Figures]) -> str:
    sizes = list(dict.fromkeys(row["peers"] for row in rows))
    found = {(row["topology"], row["peers"]): row for row in rows}
    cells = [
        [name, *("{even_s:.1f} / {uneven_s:.1f} / {far_s:.2f}".format(**found[name, n]) for n in sizes)]
        for name in FORMULAS
    ]
    return (
        "Simulated seconds on such links: 100 MB on even ones / 100 MB with every eighth slow, one at least / 1 MB on"
        " even ones where everything arrives 50 ms late.\n\n"
        + table(["topology", *(f"n = {n}" for n in sizes)], cells if sizes else [])
    )
