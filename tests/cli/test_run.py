"""The ways a command can end: exit codes and messages."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import click
import pytest
import trio

from cli.run import BUG, INTERRUPTED, Stopped, leaves, report_failure, run_until_stopped
from peer import errors

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup, ExceptionGroup


def every_error() -> Iterator[errors.BarnraiseError]:
    pending = [errors.BarnraiseError]
    while pending:
        kind = pending.pop()
        pending += [child for child in kind.__subclasses__() if child.__module__ == errors.__name__]
        if kind is errors.DialError:
            yield errors.DialError("a sentence: a remedy", "refused")
        elif kind is errors.RemoteError:
            yield errors.RemoteError("Code", "a sentence: a remedy")
        elif kind is errors.StageRefused:
            yield errors.StageRefused("a sentence: a remedy", "full")
        else:
            yield kind("a sentence: a remedy")


@pytest.mark.parametrize("error", list(every_error()), ids=lambda error: type(error).__name__)
def test_our_errors_are_one_sentence_and_their_code(
    error: errors.BarnraiseError, capsys: pytest.CaptureFixture[str]
) -> None:
    assert report_failure(error) == error.exit_code
    assert capsys.readouterr().err == "peer: a sentence: a remedy\n"


def test_a_bug_is_reported_before_a_fault_before_an_interruption(
    capsys: pytest.CaptureFixture[str],
) -> None:
    fault = errors.NetworkError("no network")
    assert report_failure(BaseExceptionGroup("", [KeyboardInterrupt(), ExceptionGroup("", [fault])])) == 3
    assert report_failure(ExceptionGroup("", [fault, ZeroDivisionError("oops")])) == BUG
    told = capsys.readouterr().err
    assert "no network" in told and "a bug ended this command (ZeroDivisionError: oops)" in told
    assert "Traceback" not in told


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--json"]])
def test_a_full_disk_is_no_bug(arguments: list[str]) -> None:
    environment = {**os.environ, "PYTHONPATH": os.getcwd()}
    with open("/dev/full", "w") as disk:
        command = [sys.executable, "-m", "cli.main", *arguments]
        ended = subprocess.run(command, stdout=disk, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert ended.returncode == errors.ResourceError.exit_code
    assert ended.stderr == (
        "peer: cannot write (No space left on device): free some space, or send the output elsewhere\n"
    )


def test_leaves_flattens() -> None:
    inner = [ValueError("a"), KeyError("b")]
    assert list(leaves(ExceptionGroup("x", [ExceptionGroup("y", inner)]))) == inner


def test_debug_adds_the_traceback(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("PEER_DEBUG", "1")
    assert report_failure(errors.ConfigError("x")) == 2
    assert "ConfigError" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (KeyboardInterrupt(), INTERRUPTED),
        (click.Abort(), INTERRUPTED),
        (Stopped(signal.SIGINT), 130),
        (Stopped(signal.SIGTERM), 143),
        (click.UsageError("no"), 2),
        (click.exceptions.Exit(4), 4),
        (SystemExit(7), 7),
    ],
)
def test_other_endings(error: BaseException, code: int) -> None:
    assert report_failure(error) == code


def test_the_result_is_returned() -> None:
    async def work() -> int:
        await trio.lowlevel.checkpoint()
        return 5

    assert run_until_stopped(work) == 5


def test_what_is_imported_is_no_part_of_collections_while_the_work_runs() -> None:
    async def work() -> int:
        await trio.lowlevel.checkpoint()
        return gc.get_freeze_count()

    assert run_until_stopped(work) > gc.get_freeze_count()


def test_a_signal_lets_the_work_clean_up() -> None:
    cleaned: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGINT)
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                await trio.lowlevel.checkpoint()
                cleaned.append("saved")

    with pytest.raises(Stopped) as caught:
        run_until_stopped(work)
    assert caught.value.exit_code == INTERRUPTED
    assert cleaned == ["saved"]


TIED = """
import sys, trio
from cli.run import report_failure, run_until_stopped
async def work():
    print("up", flush=True)
    await trio.sleep_forever()
try:
    run_until_stopped(work, tied=True)
except BaseException as error:
    sys.exit(report_failure(error))
"""


def test_a_tied_child_ends_with_its_parent() -> None:
    child = subprocess.Popen([sys.executable, "-c", TIED], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdin is not None and child.stdout is not None
    with child.stdout:
        assert child.stdout.readline() == b"up\n"
        child.stdin.close()  # as the kernel does for a parent killed by SIGKILL
        assert child.wait(timeout=60) == 143


def test_a_second_signal_ends_a_stuck_cleanup() -> None:
    stuck = TIED.replace(
        "    await trio.sleep_forever()",
        "    try:\n        await trio.sleep_forever()\n    finally:\n        with trio.CancelScope(shield=True):\n"
        "            print('cleaning', flush=True)\n            await trio.sleep_forever()",
    )
    child = subprocess.Popen(
        [sys.executable, "-c", stuck], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    assert child.stdin is not None and child.stdout is not None
    with child.stdout, child.stdin:
        assert child.stdout.readline() == b"up\n"
        child.send_signal(signal.SIGINT)
        assert child.stdout.readline() == b"cleaning\n"
        child.send_signal(signal.SIGINT)
        assert child.wait(timeout=60) == 130
