"""The table of `benchmarks/network/flow.py`, and its bars."""

from __future__ import annotations

from typing import Any

KINDS = ("hot", "cold", "beside")
BARS = {("flow", "1024", "cold"): 0.25, ("ring", "1024", "cold"): 0.06}
"""CPU in ms a message at most, by way, bytes and kind."""


def columns() -> list[str]:
    return ["ms a message", "KB", *(f"{kind}: CPU, p50, p99" for kind in ("hot", "cold", "beside a transfer"))]


def rows(ways: dict[str, Any]) -> list[list[str]]:
    """Return a row for each way and size; CPU above its bar is bold."""
    found = []
    for way, sizes in ways.items():
        for size, row in sizes.items():
            cells = [_cell(row.get(kind), BARS.get((way, size, kind))) for kind in KINDS]
            found.append([way, str(int(size) >> 10), *cells])
    return found


def _cell(figures: dict[str, float] | None, bar: float | None) -> str:
    if figures is None:
        return ""
    cpu = f"{figures['cpu_ms']:.3f}"
    if bar is not None and figures["cpu_ms"] > bar:
        cpu = f"**{cpu}**"
    return f"{cpu}, {figures['p50_ms']:.3f}, {figures['p99_ms']:.3f}"
