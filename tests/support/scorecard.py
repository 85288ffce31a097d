"""The figures of one scenario beside their bounds: printed as one JSON line, kept in a file, then judged."""

from __future__ import annotations

import datetime
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common.options import commit, machine

FILE_VARIABLE = "SCENARIO_FIGURES"
"""Names the file, if figures are to be kept: benchmarks/results/partitions.json."""


class Scorecard:
    """Figures in the order in which they were found."""

    def __init__(self, scenario: str) -> None:
        self.scenario = scenario
        self._figures: dict[str, dict[str, float]] = {}

    def note(self, name: str, value: float) -> None:
        """Keep a figure that has no bound."""
        self._figures[name] = {"value": round(value, 4)}

    def at_most(self, name: str, value: float, bound: float) -> None:
        self._figures[name] = {"value": round(value, 4), "most": round(bound, 4)}

    def at_least(self, name: str, value: float, bound: float) -> None:
        self._figures[name] = {"value": round(value, 4), "least": round(bound, 4)}

    def missed(self) -> str:
        """Return the first figure beyond its bound, as a sentence; "" if there is none."""
        for name, figure in self._figures.items():
            if "most" in figure and not figure["value"] <= figure["most"]:
                return f"{self.scenario}: {name} is {figure['value']:g}, above {figure['most']:g}"
            if "least" in figure and not figure["value"] >= figure["least"]:
                return f"{self.scenario}: {name} is {figure['value']:g}, below {figure['least']:g}"
        return ""

    def tell(self) -> None:
        sys.stdout.write("\n" + json.dumps({"scenario": self.scenario, **self._figures}) + "\n")
        if (file := os.environ.get(FILE_VARIABLE)) is not None:
            self._keep(Path(file))

    def _keep(self, file: Path) -> None:
        """Put the figures in place of the same scenario's in the file."""
        kept: dict[str, Any] = json.loads(file.read_text())["figures"] if file.exists() else {}
        kept[self.scenario] = self._figures
        head = {
            "command": f"{FILE_VARIABLE}={file.name} " + " ".join(["pytest", *sys.argv[1:]]),
            "machine": machine(),
            "commit": commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
        }
        file.write_text(json.dumps({**head, "figures": kept}, indent=1) + "\n")


@contextmanager
def scored(scenario: str) -> Iterator[Scorecard]:
    """Tell the figures of the block at its end, also of one that fails; then fail with the first one beyond its
    bound."""
    card = Scorecard(scenario)
    try:
        yield card
    finally:
        card.tell()
    assert not card.missed(), card.missed()
