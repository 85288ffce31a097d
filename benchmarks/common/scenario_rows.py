"""The table of scenarios: each figure that `tests.support.scorecard` has kept, beside its bound."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Final

HEAD: Final = ["scenario", "figure", "value", "bound"]


def rows(scenarios: Mapping[str, Mapping[str, Mapping[str, float]]]) -> Iterator[list[str]]:
    """Return a row for each figure of each scenario; a bound that is missed is marked."""
    for scenario, figures in scenarios.items():
        for name, figure in figures.items():
            yield [scenario.replace("|", "\\|"), name, f"{figure['value']:.3g}", bound_of(figure)]


def bound_of(figure: Mapping[str, float]) -> str:
    """Return the bound of a figure in words, "" if it has none."""
    value, most, least = figure["value"], figure.get("most"), figure.get("least")
    if most is not None:
        text, met = f"<= {most:.3g}", value <= most
    elif least is not None:
        text, met = f">= {least:.3g}", value >= least
    else:
        return ""
    return text if met else f"**{text}**"
