"""A second try for the few tests that a busy machine has turned red. Only .ci/run uses it; `make test` never retries.

    TEST_OUTCOMES=FOLDER python -m pytest -p tools.second_try ...   writes down what the run came to
    python -m tools.second_try FOLDER PASSES                        after so many runs, of which one failed

Up to three failed tests run once more, one after the other. What passes then is printed as `FLAKY <nodeid>`, and if all
of them pass the exit status is 0. Anything else refuses: a test that fails twice, a fourth failed test, a file that
cannot be collected, a worker that crashed (the rest of its tests never ran), a run that wrote nothing down.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

FAILED_MAX = 3
_OUTCOMES = "TEST_OUTCOMES"
_failed: set[str] = set()
_passed: set[str] = set()
_broken: list[str] = []
"""What no second try can mend."""


# -- the plugin: in the process that starts xdist's workers, which hears of all tests ---------------------------------


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:  # in its setup, its call or its teardown
        _failed.add(report.nodeid)
    elif report.when == "call" and report.passed:
        _passed.add(report.nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _broken.append(f"{report.nodeid} cannot be collected")


@pytest.hookimpl(optionalhook=True)  # of xdist
def pytest_testnodedown(node: object, error: object) -> None:
    if error:
        _broken.append(f"a worker has crashed: {error}")


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    if hasattr(session.config, "workerinput"):
        return
    ended = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
    if exitstatus not in ended:
        _broken.append(f"pytest has ended with {exitstatus!r}")
    told = {"failed": sorted(_failed), "passed": sorted(_passed - _failed), "broken": _broken}
    (Path(os.environ[_OUTCOMES]) / f"{time.time_ns()}.json").write_text(json.dumps(told))


# -- the second try ---------------------------------------------------------------------------------------------------


def read(folder: Path, runs: int) -> tuple[list[str], list[str], list[str]]:
    """Return which tests have failed and passed in so many runs, and what was broken."""
    told = [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]
    failed, passed, broken = ([item for run in told for item in run[key]] for key in ("failed", "passed", "broken"))
    if len(told) != runs:
        broken.append(f"{len(told)} of {runs} runs of pytest came to their end")
    return failed, passed, broken


def main(folder: Path, runs: int) -> int:
    failed, _, broken = read(folder, runs)
    if not failed and not broken:
        broken.append("the tests have failed, and no test has")
    if len(failed) > FAILED_MAX:
        broken.append(f"{len(failed)} tests have failed; a second try is for at most {FAILED_MAX}")
    if broken:
        return refuse(broken)
    print(f"A second try, alone: {len(failed)} failed", flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory() as again:
        command = [sys.executable, "-m", "pytest", "-p", "tools.second_try", *failed]
        done = subprocess.run(command, env={**os.environ, _OUTCOMES: again}, stdin=subprocess.DEVNULL, check=False)
        _, passed, broken = read(Path(again), 1)
    for test in failed:
        if test in passed:
            print(f"FLAKY {test}")  # noqa: T201
        else:
            broken.append(f"{test} has not passed at its second try either")
    if done.returncode and not broken:
        broken.append(f"the second try has ended with {done.returncode}")
    return refuse(broken) if broken else 0


def refuse(reasons: list[str]) -> int:
    for reason in reasons:
        print(f"REFUSED {reason}")  # noqa: T201
    return 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
