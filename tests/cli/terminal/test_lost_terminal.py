"""A terminal that goes away under a command: the command leaves cleanly or goes on, and nothing of it is a bug."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest

from cli.terminal.standard_streams import _Outlet
from tests.cli.support.lost_terminal import ROOT, losable_terminal

STAYS = """
import os, signal, sys, trio
from contextlib import nullcontext
from cli import main as program
from cli.run import run_until_stopped
from cli.terminal.lines import say
from cli.terminal.screen import live, screen

def tell(line):
    os.write(int(os.environ["TEST_SIDE"]), f"{line}\\n".encode())

async def stay():
    with live("a view", screen(err=True)) if "view" in sys.argv else nullcontext() as view:
        try:
            say("up", err=True)
            await trio.lowlevel.wait_readable(0)  # the terminal's end
            for _ in range(3):
                say("a line", "another one", err=True)
                say("on standard output")
                if view is not None:
                    view.update("another view", refresh=True)
            tell("went on")
            await trio.sleep_forever()
        finally:
            with trio.CancelScope(shield=True):
                say("the last words", err=True)
                if "slow" in sys.argv:
                    await trio.lowlevel.wait_readable(0)
                tell("saved")

if "ignores" in sys.argv:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
program.group.main = lambda **options: run_until_stopped(stay)
program.main()
"""
"""A command that stays, as all do, by way of `main` and `run_until_stopped`."""


def test_a_peer_that_loses_its_terminal_by_a_signal_leaves_and_saves() -> None:
    with losable_terminal(sys.executable, "-c", STAYS, "view") as terminal:
        terminal.until("a view", "up")
        terminal.lose()
        assert [terminal.told() for _ in range(2)] in (["saved", ""], ["went on", "saved"])
        assert terminal.process.wait(60) == 128 + signal.SIGHUP


def test_the_several_signals_of_a_closed_terminal_are_one() -> None:
    """The kernel sends one to the group in the foreground, the shell one to each of its jobs."""
    with losable_terminal(sys.executable, "-c", STAYS, "slow", has_control=False) as terminal:
        terminal.until("up")
        terminal.process.send_signal(signal.SIGHUP)
        terminal.until("the last words")
        terminal.process.send_signal(signal.SIGHUP)
        terminal.lose()
        assert [terminal.told(), terminal.process.wait(60)] == ["saved", 128 + signal.SIGHUP]


@pytest.mark.parametrize("words", [("view", "ignores"), ("disowned",)], ids=" ".join)
def test_a_peer_goes_on_without_its_terminal(words: tuple[str, ...]) -> None:
    """Started by nohup, which the signal does not reach, or in a session without the terminal, which gets none."""
    with losable_terminal(sys.executable, "-c", STAYS, *words, has_control="ignores" in words) as terminal:
        terminal.until("up")
        terminal.lose()
        assert terminal.told() == "went on"
        terminal.process.send_signal(signal.SIGTERM)
        assert [terminal.told(), terminal.process.wait(60)] == ["saved", 128 + signal.SIGTERM]


@pytest.mark.parametrize("closed", ["<&- >&- 2>&-", ">&-", "2>&- <&-"])
def test_streams_that_are_closed_lead_nowhere(closed: str) -> None:
    program = "from cli.main import main; main()"
    command = f'exec "$0" -c "{program}" --version {closed}'
    ended = subprocess.run(["sh", "-c", command, sys.executable], cwd=ROOT, capture_output=True, timeout=60)
    assert (ended.returncode, ended.stderr) == (0, b"")


def test_a_full_pipe_that_does_not_block_is_waited_for() -> None:
    """Another program that shares it has made it so."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    outlet, sent = _Outlet(write), 0
    reader = threading.Timer(0, lambda: [os.read(read, 1 << 16) for _ in range(8)])
    reader.start()
    while sent < 4 << 16:
        sent += outlet.write(bytes(1 << 16))
    reader.cancel()
    os.close(write)
    reader.join()
    os.close(read)
