"""For all tests: a quick collection, their order, skips that are errors in CI, and examples without a time limit."""

from __future__ import annotations

import gc
import json
import os
import re
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# Hypothesis gives an example 0.2 s, and data a second: a machine that stands still for a moment would fail any test.
patient = settings(settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", patient)  # `make soak`: new examples each time
settings.register_profile("same", patient, derandomize=True)  # a test that passed fails for a change's sake alone
settings.load_profile("same")

ROOT = Path(__file__).parents[1]
DURATIONS = ROOT / "tests" / "durations.json"
"""Seconds that each test file took when `make durations` measured it."""
ALL_WITH_PROCESSES = re.compile(rb"^pytestmark = .*\bpytest\.mark\.process\b", re.MULTILINE)


@pytest.fixture(scope="session", autouse=True)
def _temporary_files(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Keep the temporary files of child processes, which tests kill, in pytest's own folder."""
    os.environ["TMPDIR"] = str(tmp_path_factory.mktemp("tmp"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Look for no garbage while all is imported, a fifth of that time, nor ever again in what was imported."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    """Let each parallel worker import the test files from another one on: what one has compiled, the others load.

    In the same order all would compile each file at the same time.
    """
    worker = getattr(config, "workerinput", None)
    if worker is None or config.args != config.getini("testpaths"):
        return
    files = [str(file) for file in sorted((ROOT / "tests").rglob("test_*.py")) if not _is_left_out(file, config)]
    first = len(files) * int(worker["workerid"].removeprefix("gw")) // worker["workercount"]
    config.args = [*files[first:], *files[:first]]


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out files without a test of this pass of `make test`: each of its workers would import them all."""
    return True if _is_left_out(collection_path, config) else None


def _is_left_out(path: Path, config: pytest.Config) -> bool:
    if not (path.name.startswith("test_") and path.suffix == ".py"):
        return False
    if config.option.markexpr.startswith("process and "):
        return b"mark.process" not in path.read_bytes()
    if config.option.markexpr.startswith("not process and "):
        return ALL_WITH_PROCESSES.search(path.read_bytes()) is not None
    return False


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give soaks their time. Run the longest files first, as measured: parallel workers then end at about one time."""
    for item in items:
        if item.get_closest_marker("soak"):
            item.add_marker(pytest.mark.timeout(0))  # a soak takes what it takes
    seconds = json.loads(DURATIONS.read_text())
    items.sort(key=lambda item: (-seconds.get(str(item.path.relative_to(ROOT)), 0.0), item.path))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """In CI a skip is a failure: the machine lacks a tool that .ci/run should have installed."""
    report = yield
    if report.skipped and os.environ.get("CI") == "true" and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = (
            f"skipped in CI: {report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr}"
        )
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Write what each file took, in seconds, to tests/durations.json. TEST_DURATIONS names a file, empty at first, that
    carries the figures of one pass of `make durations` to the next: a file may have tests in both."""
    carried = os.environ.get("TEST_DURATIONS")
    if not carried or hasattr(terminalreporter.config, "workerinput"):  # each worker of xdist ends with a summary, too
        return
    seconds: dict[str, float] = defaultdict(float, json.loads(Path(carried).read_text() or "{}"))
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid.partition("::")[0]] += report.duration
    Path(carried).write_text(json.dumps(seconds))
    told = {file: round(total, 1) for file, total in sorted(seconds.items(), key=lambda one: -one[1]) if total >= 1.0}
    DURATIONS.write_text(json.dumps(told, indent=1) + "\n")
