"""A volunteer starts a run, two peers and a server by nohup, and logs out: all four go on, and leave cleanly later."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

import pytest
import trio

from cli.progress.event_tail import EventTail
from tests.cli.support.lost_terminal import LosableTerminal, losable_terminal
from tests.support.forking.command import peer_meanwhile
from tests.support.peer_process import POLL_S
from tests.support.ports import free_port
from tests.swarm.gateway.served_model import write_checkpoint
from tests.swarm.support.swarm_harness import RUN_TOML, write_text

pytestmark = pytest.mark.process

SHELL: Final = """
start() { name=$1; shift; mkdir "$name.out"; cd "$name.out"; nohup "$PYTHON" -m cli.main "$@" & cd ..
          echo "$name is $!!"; }
while read -r line; do eval "start $line"; done
"""
"""All of its jobs are in the terminal's foreground group, so that the kernel sends each the signal of a logout."""
_SUBREAPER: Final = 36


@contextmanager
def our_orphans() -> Iterator[None]:
    """Inside the block who loses its parent becomes a child of this process, which learns its exit code."""
    libc = ctypes.CDLL(None)
    libc.prctl(_SUBREAPER, 1)
    try:
        yield
    finally:
        libc.prctl(_SUBREAPER, 0)


class Login:
    """A terminal with a shell that starts `peer` commands by nohup."""

    def __init__(self, shell: LosableTerminal, folder: Path) -> None:
        self.shell, self.folder = shell, folder
        self._pids = dict[str, int]()

    def start(self, name: str, words: str, home: bool = True) -> None:
        """Run `peer WORDS`, from FOLDER/NAME if it has a `home`."""
        self.shell.type(f"{name} {words}{f' --home ../{name}' if home else ''}")
        self.shell.until(f"{name} is ", "!\r\n")
        self._pids[name] = int(self.shell.shown.rpartition(f"{name} is ".encode())[2].split(b"!")[0])

    def said(self, name: str) -> str:
        with suppress(FileNotFoundError):
            return (self.folder / f"{name}.out" / "nohup.out").read_text()
        return ""

    async def wait_said(self, name: str, words: str, times: int = 1) -> None:
        with trio.fail_after(300):
            while self.said(name).count(words) < times:
                os.kill(self._pids[name], 0)
                await trio.sleep(POLL_S)

    async def end(self, name: str) -> None:
        """Ask it to leave, and check that it does so cleanly."""
        pid = self._pids.pop(name)
        os.kill(pid, signal.SIGTERM)
        _, status = await trio.to_thread.run_sync(os.waitpid, pid, 0)
        said = self.said(name)
        assert os.waitstatus_to_exitcode(status) == 128 + signal.SIGTERM, said
        assert "Stopping cleanly" in said and "a bug" not in said and "Traceback" not in said

    def kill_all(self) -> None:
        for pid in self._pids.values():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextmanager
def login(folder: Path) -> Iterator[Login]:
    with our_orphans(), losable_terminal("sh", "-c", SHELL, folder=folder, PYTHON=sys.executable) as shell:
        opened = Login(shell, folder)
        try:
            yield opened
        finally:
            opened.kill_all()


async def told_by(home: Path, name: str, where: str = "round", least: int = 0) -> int:
    """Wait for an event of a peer, and return its round."""
    tail = EventTail(home / "events.jsonl")
    try:
        with trio.fail_after(300):
            while True:
                for _, event, fields in tail.poll():
                    if event == name and fields.get(where, 0) >= least:
                        return int(fields.get(where, 0))
                await trio.sleep(POLL_S)
    finally:
        tail.close()


@pytest.mark.soak
async def test_a_run_outlives_the_terminal_of_its_start(tmp_path: Path) -> None:
    (tmp_path / "text").mkdir()
    write_text(tmp_path / "text")
    (tmp_path / "run.toml").write_text(RUN_TOML.format(rounds=0, min_peers=2, outer="[outer]\nsteps = 20"))
    with login(tmp_path) as logged_in:
        logged_in.start("c", f"coordinate ../run.toml --listen /ip4/127.0.0.1/tcp/{free_port()}")
        await logged_in.wait_said("c", "To take part")
        invite, at = tmp_path / "c" / "invite", "--threads 1 --listen /ip4/127.0.0.1/tcp/0"
        for name in ("p0", "p1"):
            logged_in.start(name, f"join {invite} --name {name} --data ../text {at}")
        logged_in.start("s", f"serve {invite} {at}")
        begun = max([await told_by(tmp_path / name, "round_committed") for name in ("p0", "p1")])
        await told_by(tmp_path / "s", "commit_served")
        logged_in.shell.lose()
        for name in ("p0", "p1"):
            await told_by(tmp_path / name, "round_committed", least=begun + 3)
        answer = await peer_meanwhile("generate", str(invite), "Once", "--max-tokens", "3")
        assert answer.returncode == 0, answer.stderr
        for name in ("s", "p0", "p1", "c"):
            await logged_in.end(name)


async def test_a_relay_outlives_the_terminal_of_its_start(tmp_path: Path) -> None:
    with login(tmp_path) as logged_in:
        logged_in.start("r", "relay --listen /ip4/127.0.0.1/tcp/0 --status-every 0.1")
        await logged_in.wait_said("r", "reservations of")
        logged_in.shell.lose()
        await logged_in.wait_said("r", "reservations of", 2 + logged_in.said("r").count("reservations of"))
        await logged_in.end("r")


@pytest.mark.soak
async def test_a_monitor_and_an_interface_outlive_it_too(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    write_checkpoint(folder)
    with login(tmp_path) as logged_in:
        logged_in.start("s", f"serve --model {folder} --listen /ip4/127.0.0.1/tcp/0 --threads 1")
        await logged_in.wait_said("s", "peer generate")
        invite = tmp_path / "s" / "invite"
        logged_in.start("m", f"monitor {invite} --listen 127.0.0.1:0 --json --db ../m.db", home=False)
        logged_in.start("a", f"api {invite} --listen 127.0.0.1:0 --json", home=False)
        for name in ("m", "a"):
            await logged_in.wait_said(name, "listening")
        logged_in.shell.lose()
        answer = await peer_meanwhile("generate", str(invite), "Once", "--max-tokens", "3")
        assert answer.returncode == 0, answer.stderr
        for name in ("m", "a", "s"):
            await logged_in.end(name)
