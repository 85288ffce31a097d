"""Rules of the specification, switched off one at a time. The core has no switches: its functions are patched here.

A rule whose absence is not noticed is not needed, or not checked. `python -m tests.simulation --mutations FOLDER` says
of each rule what notices it: random schedules, its directed schedule, or the exhaustive search."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from tests.simulation.campaign import run_one
from tests.simulation.rules_off import RULES, Rule
from tests.simulation.setups import SETUPS

SEARCHED_S: Final = 120.0  # for one rule, at most


@dataclass(frozen=True)
class Row:
    """What noticed that a rule was off."""

    rule: str
    setups: tuple[str, ...]
    schedules: int
    """How many random schedules were run."""
    found_after: int | None
    """After how many schedules the first one broke that holds with the rule."""
    broke: str
    directed: str
    exhaustive: str


@contextmanager
def switched_off(rule: Rule) -> Iterator[None]:
    """Run the core without a rule."""
    with ExitStack() as stack:
        for patch in rule.patches():
            stack.enter_context(patch)
        yield


def search(rule: Rule, schedules: int, first_seed: int = 0, seconds: float = SEARCHED_S) -> Row:
    """Run random schedules without the rule until one breaks that holds with it."""
    began = time.monotonic()
    for index in range(schedules):
        name, seed = rule.setups[index % len(rule.setups)], first_seed + index // len(rule.setups)
        with switched_off(rule):
            found = run_one(name, seed).found
        if found:
            kind = found[0].what.partition(":")[0]
            usual = run_one(name, seed).found
            if not usual or usual[0].what.partition(":")[0] != kind:
                return Row(rule.name, rule.setups, index + 1, index + 1, kind, rule.directed, rule.exhaustive)
        if time.monotonic() - began > seconds:
            break
    return Row(rule.name, rule.setups, index + 1, None, "", rule.directed, rule.exhaustive)


def _search(job: tuple[str, int]) -> Row:
    name, schedules = job
    return search(next(rule for rule in RULES if rule.name == name), schedules)


def write_table(folder: Path, schedules: int, workers: int) -> int:
    """Write `mutations.json` and `mutations.md`. Return 1 if nothing notices some rule."""
    assert all(setup in SETUPS for rule in RULES for setup in rule.setups)
    jobs = [(rule.name, schedules) for rule in RULES]
    with ProcessPoolExecutor(workers) as pool:
        rows = list(pool.map(_search, jobs))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "mutations.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    lines = ["| rule switched off | random: first found of | breaks | directed | exhaustive |", "|---|---|---|---|---|"]
    for row in rows:
        random = f"{row.found_after} of {row.schedules}" if row.found_after else f"not in {row.schedules}"
        lines.append(f"| {row.rule} | {random} | {row.broke} | {row.directed} | {row.exhaustive} |")
    (folder / "mutations.md").write_text("\n".join(lines) + "\n")
    return int(any(not (row.found_after or row.directed or row.exhaustive) for row in rows))
