"""A whole swarm of real `peer` processes on 127.0.0.1, driven by what they report.

    async with open_swarm(tmp_path) as swarm:
        peers = [swarm.join(f"p{i}") for i in range(3)]
        await swarm.committed(2, *peers)                       # all of them have committed round 2
        peers[0].kill()
        await swarm.committed(peers[1].round + 2, *peers[1:])
        swarm.check_agreement()

The end of the block ends every process, frozen ones and compute workers included; so does the death of this process.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import uuid
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import trio

from cli.views.event_tail import EventTail
from tests.support.ports import free_port

REPO: Final = Path(__file__).parents[3]
POLL_S: Final = 0.02
LEAVE_S: Final = 15.0
TEXT_BYTES: Final = 1_000_000
MARK: Final = "BARNRAISE_HARNESS"

RUN_TOML: Final = """
[run]
name = "harness"
rounds = {rounds}
min_peers = {min_peers}
members_per_prefix = 64

[model]
vocab_size = 256
hidden_size = 32
layers = 2
heads = 2
kv_heads = 1
intermediate_size = 64
max_seq_len = 128

[data]
seq_len = 64
source = "folder"

[inner]
lr = 4e-3
batch_size = 4
total_steps = 2000
warmup_steps = 10

{outer}
"""


@dataclass(frozen=True)
class Fact:
    """One event of one peer; `at` is seconds since the Unix epoch."""

    at: float
    name: str
    fields: dict[str, Any]


@dataclass(eq=False)
class PeerProcess:
    """One `peer join` or `peer coordinate`. `facts` are its events so far, oldest first, over all of its lives."""

    name: str
    home: Path
    arguments: tuple[str, ...]
    process: subprocess.Popen[bytes]
    tail: EventTail
    facts: list[Fact] = field(default_factory=list)
    news: trio.Event = field(default_factory=trio.Event)

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    @property
    def round(self) -> int:
        """The last round it committed or adopted; 0 if none."""
        rounds = [f.fields["round"] for f in self.facts if f.name in ("round_committed", "head_adopted")]
        return int(rounds[-1]) if rounds else 0

    @property
    def commits(self) -> list[Fact]:
        return self.all("round_committed")

    @property
    def state_hash(self) -> str:
        """Of the last head it committed or adopted; "" if none."""
        hashes = [f.fields["state_hash"] for f in self.facts if f.name in ("round_committed", "head_adopted")]
        return str(hashes[-1]) if hashes else ""

    def all(self, name: str) -> list[Fact]:
        return [fact for fact in self.facts if fact.name == name]

    def mark(self) -> int:
        """A place in its facts, to wait only for what comes after it."""
        return len(self.facts)

    async def wait_for(
        self,
        name: str,
        where: Callable[[dict[str, Any]], bool] = lambda fields: True,
        since: int = 0,
        timeout_s: float = 300.0,
    ) -> Fact:
        """The first fact called `name` for which `where(fields)`, from place `since` on; waits until there is one."""
        found: list[Fact] = []

        def seen() -> bool:
            nonlocal since
            found.extend(fact for fact in self.facts[since:] if fact.name == name and where(fact.fields))
            since = len(self.facts)
            return bool(found)

        await self.until(seen, name, timeout_s)
        return found[0]

    async def until(self, condition: Callable[[], bool], what: str, timeout_s: float = 300.0) -> None:
        """Until `condition()` holds; it is asked again after each new fact of this peer."""
        with trio.move_on_after(timeout_s):
            while not condition():
                await self.news.wait()
            return
        raise AssertionError(f"{self.name}: no {what} within {timeout_s:g} s.\n{self.transcript()}")

    @property
    def is_stopped(self) -> bool:
        """Whether it is frozen."""
        return _state(self.process.pid) == "T"

    async def wait_exit(self, timeout_s: float = 300.0) -> int:
        """Its exit status; negative for the signal that ended it."""
        with trio.move_on_after(timeout_s):
            while self.process.poll() is None:
                await trio.sleep(POLL_S)
            self.poll()
            return int(self.process.returncode)
        raise AssertionError(f"{self.name} has not ended within {timeout_s:g} s.\n{self.transcript()}")

    async def wait_stopped(self, timeout_s: float = 300.0) -> None:
        """Until it is frozen (state T), by us or by a scripted fault."""
        with trio.move_on_after(timeout_s):
            while not self.is_stopped:
                await trio.sleep(POLL_S)
            return
        raise AssertionError(f"{self.name} was not frozen within {timeout_s:g} s.\n{self.transcript()}")

    def kill(self) -> None:
        """SIGKILL, as a power cut would; reaps it."""
        self.process.kill()
        self.process.wait()
        self.poll()
        assert self.process.stdin is not None
        self.process.stdin.close()

    def freeze(self) -> None:
        self.process.send_signal(signal.SIGSTOP)

    def thaw(self) -> None:
        self.process.send_signal(signal.SIGCONT)

    def interrupt(self) -> None:
        """Ctrl-C."""
        self.process.send_signal(signal.SIGINT)

    def longest_pause(self, since: float, until: float = float("inf")) -> float:
        """The longest time between two of its commits, of those in that span of time (seconds since the epoch)."""
        return max(self.pauses(since, until), default=0.0)

    def pauses(self, since: float, until: float = float("inf")) -> list[float]:
        """Seconds from `since` to its first commit after that, and from each commit to the next."""
        times = [since, *(fact.at for fact in self.commits if since <= fact.at <= until)]
        return [b - a for a, b in pairwise(times)]

    def transcript(self, lines: int = 40) -> str:
        """Its last facts and what it printed, for a failed test."""
        facts = "\n".join(f"  {fact.at:.2f} {fact.name} {fact.fields}" for fact in self.facts[-lines:])
        with suppress(OSError):
            printed = self.log.read_text(errors="replace")[-2000:]
            return f"{facts}\n  --- printed ---\n{printed}"
        return facts

    @property
    def log(self) -> Path:
        return self.home.with_suffix(".log")

    def poll(self) -> None:
        fresh = [Fact(*event) for event in self.tail.poll()]
        if fresh:
            self.facts.extend(fresh)
            self.news.set()
            self.news = trio.Event()


class Swarm:
    """Made by `open_swarm`. `peers`: every peer ever started but the coordinator, by name."""

    def __init__(self, folder: Path, run_toml: str) -> None:
        self.folder = folder
        self.token = uuid.uuid4().hex
        self.port = free_port()
        self.peers: dict[str, PeerProcess] = {}
        self._run_toml = folder / "run.toml"
        self._run_toml.write_text(run_toml)
        self.coordinator = self._start("coordinator", ["coordinate", str(self._run_toml), *self._listen()], "")

    @property
    def invite(self) -> Path:
        return self.coordinator.home / "invite"

    def join(self, name: str, *options: str, fault: str = "", invite: Path | None = None) -> PeerProcess:
        """Start a peer. `fault`: a BARNRAISE_FAULT such as "kill:before_vote:3"; `invite`: a file with another one than
        the coordinator's."""
        fixed = ("--threads", "1", "--data", str(self.folder / "text"), "--listen", "/ip4/127.0.0.1/tcp/0")
        arguments = ["join", str(invite or self.invite), "--name", name, *fixed, *options]
        self.peers[name] = self._start(name, arguments, fault)
        return self.peers[name]

    def restart(self, peer: PeerProcess, fault: str = "") -> None:
        """Start a peer (or the coordinator) that has ended again, with the same home; its facts go on."""
        assert not peer.alive, f"{peer.name} is still running"
        peer.kill()  # closes what is left of its last life
        peer.process = self._spawn(peer.home, peer.arguments, fault)

    async def wait_invite(self, timeout_s: float = 300.0) -> None:
        """Until the coordinator has written its invite."""
        with trio.move_on_after(timeout_s):
            while self.coordinator.alive and not self.invite.exists():
                await trio.sleep(POLL_S)
        assert self.invite.exists(), f"the coordinator gave no invite.\n{self.coordinator.transcript()}"

    async def committed(self, round_number: int, *peers: PeerProcess, timeout_s: float = 300.0) -> None:
        """Until each of `peers` (default: all that live) stands at `round_number` or later."""
        for peer in peers or tuple(self.living()):
            await peer.until(lambda peer=peer: peer.round >= round_number, f"round {round_number}", timeout_s)

    def living(self) -> Iterator[PeerProcess]:
        return (peer for peer in self.peers.values() if peer.alive)

    def processes(self) -> list[PeerProcess]:
        return [self.coordinator, *self.peers.values()]

    def hashes(self) -> dict[tuple[int, int], set[str]]:
        """State hashes reported for each (term, round): more than one is a fork."""
        found: dict[tuple[int, int], set[str]] = {}
        for peer in self.peers.values():
            for fact in peer.facts:
                if fact.name in ("round_committed", "head_adopted"):
                    place = (int(fact.fields["term"]), int(fact.fields["round"]))
                    found.setdefault(place, set()).add(str(fact.fields["state_hash"]))
        return found

    def check_agreement(self) -> None:
        """No two peers ever reported different states for one round, and no peer reported a bug."""
        forks = {place: hashes for place, hashes in self.hashes().items() if len(hashes) > 1}
        assert not forks, f"forked at (term, round): {forks}\n{self.transcript()}"
        bugs = [(peer.name, fact.fields) for peer in self.processes() for fact in peer.all("bug")]
        assert not bugs, bugs

    def check_chain(self) -> None:
        """Each (term, round) has one head, and each head names the one before it in its term as its previous."""
        heads: dict[tuple[int, int], tuple[str, str]] = {}
        for peer in self.peers.values():
            for fact in peer.facts:
                if fact.name in ("round_committed", "head_adopted") and fact.fields["round"] > 0:
                    place = (int(fact.fields["term"]), int(fact.fields["round"]))
                    head = (str(fact.fields["head"]), str(fact.fields["previous"]))
                    assert heads.setdefault(place, head) == head, f"two heads at (term, round) {place}"
        for (term, number), (_, previous) in heads.items():
            before = heads.get((term, number - 1))
            assert before is None or previous == before[0], f"term {term} has a gap in its chain at round {number}"

    def transcript(self) -> str:
        return "\n".join(f"== {peer.name}\n{peer.transcript(15)}" for peer in self.processes())

    def ended(self) -> str:
        """What each peer that is no more said last: the one that a test waits for may be waiting for it."""
        gone = [peer for peer in [self.coordinator, *self.peers.values()] if not peer.alive]
        return "\n".join(f"== {peer.name} ended with {peer.process.returncode}\n{peer.transcript(5)}" for peer in gone)

    async def run(self) -> None:
        """Read what all processes report, until cancelled."""
        while True:
            for peer in self.processes():
                peer.poll()
            await trio.sleep(POLL_S)

    async def end_all(self) -> None:
        """Ask all processes to leave, then end them."""
        for peer in self.processes():
            if peer.alive:
                peer.interrupt()
                peer.thaw()
        with trio.move_on_after(LEAVE_S):
            while any(peer.alive for peer in self.processes()) or self.leftovers():
                await trio.sleep(POLL_S)
        for peer in self.processes():
            peer.kill()
        for pid in self.leftovers():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with trio.move_on_after(LEAVE_S):
            while self.leftovers():  # a killed process takes a moment to be gone
                await trio.sleep(POLL_S)
        for peer in self.processes():
            peer.tail.close()

    def leftovers(self) -> list[int]:
        """Processes that our children started and that still run: their environment names this swarm."""
        marked = []
        for folder in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                if self.token.encode() in (folder / "environ").read_bytes() and _state(int(folder.name)) != "Z":
                    marked.append(int(folder.name))
        known = {peer.process.pid for peer in [self.coordinator, *self.peers.values()]}
        return [pid for pid in marked if pid not in known]

    def _listen(self) -> list[str]:
        return ["--listen", f"/ip4/127.0.0.1/tcp/{self.port}"]

    def _start(self, name: str, arguments: list[str], fault: str) -> PeerProcess:
        home = self.folder / name
        tail = EventTail(home / "events.jsonl")
        return PeerProcess(name, home, tuple(arguments), self._spawn(home, tuple(arguments), fault), tail)

    def _spawn(self, home: Path, arguments: tuple[str, ...], fault: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "cli.main", *arguments, "--home", str(home), "--tied"]
        if setpriv := shutil.which("setpriv"):  # a frozen child would not notice that we are gone
            command = [setpriv, "--pdeathsig", "KILL", *command]
        environment = {**os.environ, "PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1", MARK: self.token}
        environment["BARNRAISE_FAULT"] = fault
        with home.with_suffix(".log").open("ab") as log:
            return subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env=environment, start_new_session=True
            )


@asynccontextmanager
async def open_swarm(
    folder: Path, *, rounds: int = 0, min_peers: int = 2, steps: int = 20, outer: str = "", run: str = RUN_TOML
) -> AsyncIterator[Swarm]:
    """A coordinator whose invite is ready. `steps`: inner steps a round; `rounds` 0 trains until the block is left.
    `outer`: sections of RUN.toml for another method than DiLoCo; `run`: the whole file, to be filled in as `RUN_TOML`
    is."""
    text = folder / "text"
    text.mkdir()
    _write_text(text)
    toml = run.format(rounds=rounds, min_peers=min_peers, outer=outer or f"[outer]\nsteps = {steps}")
    swarm = Swarm(folder, toml)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.run)
            await swarm.wait_invite()
            try:
                yield swarm
            except Exception:
                sys.stderr.write(swarm.ended())  # pytest shows it with the failure
                raise
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await swarm.end_all()


def _write_text(folder: Path) -> None:
    """A little of the standard library: reading all of it would be most of a short test."""
    size = 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size < TEXT_BYTES:
            shutil.copy(source, folder / f"{source.stem}.txt")
            size += source.stat().st_size


def _state(pid: int) -> str:
    """R, S, T (stopped), Z ...; "" if there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return ""
