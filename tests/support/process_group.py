"""Real `peer` processes of one test: started, read and ended together."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import trio

from cli.progress.event_tail import EventTail
from tests.support.forking.forked import ForkedProcess
from tests.support.forking.server import MARK, MARK_LETTERS
from tests.support.peer_process import POLL_S, PeerProcess, state_of

REPO: Final = Path(__file__).parents[2]
LEAVE_S: Final = 15.0


@dataclass(frozen=True)
class Launch:
    """How a process is started: the address it listens on, its network namespace, its program, and variables for it."""

    listen: str = "/ip4/127.0.0.1/tcp/0"
    namespace: str = ""
    module: str = "cli.main"
    environment: Mapping[str, str] = field(default_factory=dict)


class ProcessGroup:
    """The processes whose homes are in `folder`. `launch`: how the process of that name is started."""

    def __init__(self, folder: Path, launch: Callable[[str], Launch] = lambda name: Launch()) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex
        self.all: list[PeerProcess] = []
        self._launch = launch

    def start(self, name: str, arguments: list[str], fault: str = "") -> PeerProcess:
        """Start a process. `fault`: a BARNRAISE_FAULT such as "kill:before_vote:3"."""
        home = self.folder / name
        tail = EventTail(home / "events.jsonl")
        peer = PeerProcess(name, home, tuple(arguments), self._spawn(home, tuple(arguments), fault), tail)
        self.all.append(peer)
        return peer

    def restart(self, peer: PeerProcess, fault: str = "") -> None:
        """Start a process that has ended again, with the same home; its facts go on."""
        assert not peer.alive, f"{peer.name} is still running"
        peer.kill()  # closes what is left of its last life
        peer.process = self._spawn(peer.home, peer.arguments, fault)

    def living(self) -> list[PeerProcess]:
        return [peer for peer in self.all if peer.alive]

    def ended(self) -> str:
        """What each process that is no more said last: the one that a test waits for may be waiting for it."""
        gone = [peer for peer in self.all if not peer.alive]
        return "\n".join(f"== {peer.name} ended with {peer.process.returncode}\n{peer.transcript(5)}" for peer in gone)

    async def run(self) -> None:
        """Read what all processes report, until cancelled."""
        while True:
            for peer in self.all:
                peer.poll()
            await trio.sleep(POLL_S)

    async def end_all(self) -> None:
        """Ask all processes to leave, then end them."""
        for peer in self.living():
            peer.interrupt()
            peer.thaw()
        with trio.move_on_after(LEAVE_S):
            while self.living() or self.leftovers():
                await trio.sleep(POLL_S)
        for peer in self.all:
            peer.kill()
        for pid in self.leftovers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with trio.move_on_after(LEAVE_S):
            while self.leftovers():  # a killed process takes a moment to be gone
                await trio.sleep(POLL_S)
        for peer in self.all:
            peer.tail.close()

    def leftovers(self) -> list[int]:
        """Processes that our children started and that still run: their environment, or their name, is this group's."""
        marked = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                ours = self.token.encode() in (folder / "environ").read_bytes()
                ours |= (folder / "comm").read_text().strip() == self.token[:MARK_LETTERS]  # it was forked
                if ours and state_of(int(folder.name)) != "Z":
                    marked.append(int(folder.name))
        known = {peer.process.pid for peer in self.all}
        return [pid for pid in marked if pid not in known]

    def _spawn(self, home: Path, arguments: tuple[str, ...], fault: str) -> subprocess.Popen[bytes]:
        launch = self._launch(home.name)
        options = ["--listen", launch.listen, "--home", str(home)]
        extra = {MARK: self.token, "BARNRAISE_FAULT": fault}
        return spawn([*arguments, *options], home.with_suffix(".log"), extra, launch)


def spawn(
    arguments: Sequence[str], log: Path, environment: Mapping[str, str], launch: Launch = Launch()
) -> subprocess.Popen[bytes]:
    """Start `peer ARGUMENTS --tied`, whose output is added to `log`. It ends with this process."""
    own = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", **launch.environment, **environment}
    with log.open("ab") as file:
        command = (launch.module, *arguments, "--tied")
        return ForkedProcess(
            *command, stdin=subprocess.PIPE, stdout=file, stderr=file, env=own, namespace=launch.namespace
        )
