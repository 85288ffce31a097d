"""The holes of py-libp2p 0.8.1: closed with the fixes, open without them. So every test is known to detect its hole.

Scenarios run in child processes (`holes_node`): one for all with the fixes, a fork for each without, which may die of
it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.peer.support.holes_node import SCENARIOS

_ROOT = Path(__file__).parents[4]
_TIMEOUT_S = 400.0

pytestmark = pytest.mark.process


def _provoke(library: str, names: list[str]) -> dict[str, str]:
    """Return what went wrong in each scenario, "" for nothing. A death or a hang of the child fails all later ones."""
    command = [sys.executable, "-m", "tests.peer.support.holes_node", library, *names]
    with subprocess.Popen(command, cwd=_ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            printed, errors = child.communicate(timeout=_TIMEOUT_S)
            rest = f"the node died: {errors[-2000:]}"
        except subprocess.TimeoutExpired:
            child.kill()
            printed, _ = child.communicate()
            rest = f"no end within {_TIMEOUT_S:g} s"
    holes = {line["name"]: str(line["hole"]) for line in map(json.loads, printed.splitlines())}
    return {name: holes.get(name, rest) for name in names}


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest) -> Iterator[dict[str, Future[dict[str, str]]]]:
    """Run the selected scenarios, those with the fixes beside those without."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    selected: list[dict[str, Any]] = [dict(item.callspec.params) for item in items]
    with ThreadPoolExecutor(max_workers=2) as pool:
        yield {
            library: pool.submit(_provoke, library, [one["name"] for one in selected if one["library"] == library])
            for library in ("fixed", "stock")
        }
        pool.shutdown(cancel_futures=True)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.parametrize("library", ["fixed", "stock"])
def test_hole(outcomes: dict[str, Future[dict[str, str]]], library: str, name: str) -> None:
    hole = outcomes[library].result()[name]
    if library == "fixed":
        assert hole == ""
    else:
        assert hole != "", "stock 0.8.1 behaves: this fix, or its scenario, is not needed"
