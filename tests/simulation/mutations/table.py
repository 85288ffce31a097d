"""Rules of the specification, switched off one at a time. The core has no switches: its functions are patched here.

A rule whose absence is not noticed is not needed, or not checked. `python -m tests.simulation --mutations FOLDER` says
of each rule what notices it: random schedules, its directed schedule, or the exhaustive search."""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest

from tests.simulation.campaign import processor_time_limit, run_one
from tests.simulation.mutations.audited import AUDITED
from tests.simulation.mutations.batches import BATCHES
from tests.simulation.mutations.rules_off import RULES, Rule
from tests.simulation.mutations.starts import STARTS
from tests.simulation.setups import SETUPS
from tests.simulation.test_exhaustive import FORK

ALL: Final = (*RULES, *STARTS, *AUDITED, *BATCHES)
ROOT: Final = Path(__file__).parents[3]
DIRECTED: Final = ROOT / "tests" / "swarm" / "protocol" / "agreement"
SLOW: Final = {"test_total"}
SEARCHED_S: Final = 120.0  # for one rule, at most, unless the caller says otherwise


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
    directed: tuple[str, ...]
    exhaustive: str


@contextmanager
def switched_off(rule: Rule) -> Iterator[None]:
    """Run the core without a rule."""
    with ExitStack() as stack:
        for patch in rule.patches():
            stack.enter_context(patch)
        yield


def directed(rule: Rule) -> tuple[str, ...]:
    """Return the directed schedules that fail without the rule, and pass with it."""
    found = []
    for name, test in _that_pass():
        with switched_off(rule):
            if test():
                found.append(name)
    return tuple(found)


def exhaustive(rule: Rule) -> str:
    """Return the exhaustive search that forks without the rule."""
    return rule.exhaustive if rule.exhaustive and FORK[rule.exhaustive].run()[1] else ""


@lru_cache(maxsize=1)
def _that_pass() -> list[tuple[str, Callable[[], bool]]]:
    return [(name, test) for name, test in _directed_tests() if not test()]


def _directed_tests() -> Iterator[tuple[str, Callable[[], bool]]]:
    """Return each test of the core that needs no fixture, as a function that says whether it fails."""
    for path in sorted(DIRECTED.rglob("test_*.py")):
        module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
        for name, test in vars(module).items():
            if name.startswith("test_") and callable(test) and path.stem not in SLOW:
                cases = _cases(test)
                yield name, partial(_fails, test, cases)


def _cases(test: Any) -> list[dict[str, Any]]:
    """Return the arguments of each case of a parametrized test."""
    cases: list[dict[str, Any]] = [{}]
    for mark in getattr(test, "pytestmark", ()):
        if mark.name == "parametrize":
            names = [n.strip() for n in mark.args[0].split(",")] if isinstance(mark.args[0], str) else mark.args[0]
            rows = [value if len(names) > 1 else (value,) for value in mark.args[1]]
            cases = [case | dict(zip(names, row, strict=True)) for case in cases for row in rows]
    return cases


def _fails(test: Callable[..., None], cases: list[dict[str, Any]]) -> bool:
    for case in cases:
        with processor_time_limit():
            try:
                test(**case)
            except (Exception, pytest.fail.Exception):  # noqa: BLE001  however it fails, it notices
                return True
    return False


def search(rule: Rule, schedules: int, first_seed: int = 0, seconds: float = SEARCHED_S) -> Row:
    """Run random schedules without the rule until one breaks that holds with it; if none does, directed ones."""
    began = time.process_time()  # of this process: other work on the machine must not cut a search short
    for index in range(schedules):
        name, seed = rule.setups[index % len(rule.setups)], first_seed + index // len(rule.setups)
        with switched_off(rule):
            found = run_one(name, seed).found
        if found:
            kind = found[0].what.partition(":")[0]
            usual = run_one(name, seed).found
            if not usual or usual[0].what.partition(":")[0] != kind:
                return Row(rule.name, rule.setups, index + 1, index + 1, kind, (), exhaustive(rule))
        if time.process_time() - began > seconds:
            break
    return Row(rule.name, rule.setups, index + 1, None, "", directed(rule), exhaustive(rule))


def _search(job: tuple[str, int, float]) -> Row:
    name, schedules, seconds = job
    return search(next(rule for rule in ALL if rule.name == name), schedules, seconds=seconds)


def _short(found: tuple[str, ...]) -> str:
    return f"`{found[0]}`" + (f" and {len(found) - 1} more" if len(found) > 1 else "") if found else ""


def write_table(folder: Path, schedules: int, workers: int, seconds: float = SEARCHED_S) -> int:
    """Write `mutations.json` and `mutations.md`, a row as soon as it is known. Rows that are there already stay, so
    that a search that was cut short goes on. Return 1 if nothing notices some rule."""
    assert all(setup in SETUPS for rule in ALL for setup in rule.setups)
    folder.mkdir(parents=True, exist_ok=True)
    rows = _known(folder / "mutations.json")
    if rows:
        sys.stdout.write(f"{len(rows)} rows of {folder} stay as they are: remove it to search for all again\n")
    jobs = [(rule.name, schedules, seconds) for rule in ALL if rule.name not in rows]
    with ProcessPoolExecutor(workers) as pool:
        for done in as_completed([pool.submit(_search, job) for job in jobs]):
            row = done.result()
            rows[row.rule] = row
            _write(folder, [rows[rule.name] for rule in ALL if rule.name in rows])
    return int(any(not (row.found_after or row.directed or row.exhaustive) for row in rows.values()))


def _known(path: Path) -> dict[str, Row]:
    """Return the rows, by rule, that an earlier search has written."""
    found = msgspec.json.decode(path.read_bytes(), type=list[Row]) if path.exists() else []
    return {row.rule: row for row in found}


def _write(folder: Path, rows: list[Row]) -> None:
    (folder / "mutations.json").write_text(json.dumps([asdict(row) for row in rows], indent=1) + "\n")
    lines = [
        "| rule switched off | random schedules: first found at | what breaks | else noticed by |",
        "|---|---|---|---|",
    ]
    for row in rows:
        random = f"{row.found_after}" if row.found_after else f"not in {row.schedules}"
        searched = f"exhaustive search: {row.exhaustive}" if row.exhaustive else ""
        noticed = "; ".join(part for part in (_short(row.directed), searched) if part)
        lines.append(f"| {row.rule} | {random} | {row.broke} | {noticed} |")
    (folder / "mutations.md").write_text("\n".join(lines) + "\n")
