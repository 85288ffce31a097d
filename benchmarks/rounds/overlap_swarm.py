"""The swarm of `benchmarks/rounds/overlap.py`: real peers on shaped links, their events and their bytes."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

from benchmarks.common.shaped_lan import HUB_IP, Lan, sent_over_link
from cli.progress.event_tail import EventTail
from peer.config import InnerConfig, ModelConfig

ROOT = Path(__file__).parents[2]
SAMPLE_S = 0.01
ROUND_S, START_S = 60.0, 90.0
TEXT_BYTES = 1_000_000
MODEL = ModelConfig(
    vocab_size=256, hidden_size=256, layers=8, heads=4, kv_heads=2, intermediate_size=640, max_seq_len=64
)
INNER = InnerConfig(lr=2e-3, batch_size=4, total_steps=2000, warmup_steps=10)
RUN_TOML = """
[run]
name = "overlap"
open = true
rounds = {rounds}
min_peers = {peers}
members_per_prefix = {peers}
coordinator = "witness"

[model]
vocab_size = {model.vocab_size}
hidden_size = {model.hidden_size}
layers = {model.layers}
heads = {model.heads}
kv_heads = {model.kv_heads}
intermediate_size = {model.intermediate_size}
max_seq_len = {model.max_seq_len}

[data]
seq_len = {model.max_seq_len}
source = "folder"

[inner]
lr = {inner.lr}
batch_size = {inner.batch_size}
total_steps = {inner.total_steps}
warmup_steps = {inner.warmup_steps}

[codec]
up = "int8"
down = "int8"

[outer]
{outer}
lr = 0.4
momentum = 0.9
"""


class Failed(Exception):
    """A run did not finish."""


@dataclass(eq=False)
class Member:
    """A peer in its own namespace: its events, and the bytes sent over its link, (time, bytes)."""

    process: subprocess.Popen[bytes]
    tail: EventTail
    events: list[tuple[float, str, dict[str, Any]]] = field(default_factory=list)
    link: list[tuple[float, int]] = field(default_factory=list)

    def poll(self) -> None:
        self.events.extend(self.tail.poll())
        self.link.append((time.time(), sent_over_link(self.process.pid)))

    def sent(self, at: float) -> int:
        """Return the bytes sent by then."""
        return self.link[max(0, bisect_right(self.link, at, key=itemgetter(0)) - 1)][1]

    def all(self, name: str) -> Iterator[tuple[float, dict[str, Any]]]:
        return ((at, fields) for at, event, fields in self.events if event == name)

    def rounds(self, name: str) -> dict[int, tuple[float, dict[str, Any]]]:
        """Return the last event of that name of each round."""
        return {fields["round"]: (at, fields) for at, fields in self.all(name)}


def spawn(command: list[str], log: Path) -> subprocess.Popen[bytes]:
    """Start a process that ends with its standard input (`--tied`), and so with this one."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    with log.open("wb") as out:
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=out, stderr=out, env=environment, cwd=ROOT)


def end(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    assert process.stdin is not None
    process.stdin.close()


def run_swarm(lan: Lan, folder: Path, outer: str, rounds: int, peers: int) -> list[Member]:
    """Train until every peer has committed that many rounds and measured the loss."""
    folder.mkdir()
    toml = folder / "run.toml"
    toml.write_text(RUN_TOML.format(rounds=rounds, peers=peers, model=MODEL, inner=INNER, outer=outer))
    program = [sys.executable, "-m", "cli.main"]
    with ExitStack() as stack:

        def start(place: list[str], name: str, *arguments: str) -> Member:
            home = folder / name
            command = [*place, *arguments, "--home", str(home), "--tied"]
            process = spawn(command, folder / f"{name}.log")
            stack.callback(end, process)
            return Member(process, EventTail(home / "events.jsonl"))

        listen = ("--listen", f"/ip4/{HUB_IP}/tcp/31337")
        coordinator = start(lan.at_hub(*program), "coordinator", "coordinate", str(toml), *listen)
        invite = folder / "coordinator" / "invite"
        deadline = time.monotonic() + START_S
        while not invite.exists():
            if coordinator.process.poll() is not None or time.monotonic() > deadline:
                raise Failed(f"the coordinator wrote no invite{last_words(folder / 'coordinator.log')}")
            time.sleep(SAMPLE_S)
        members = []
        for i in range(peers):
            listen = ("--listen", f"/ip4/{lan.ip(i)}/tcp/31337")
            place = lan.at_host(i, *program)
            options = ("--threads", "1", "--data", str(folder.parent / "text"), *listen)
            members.append(start(place, f"p{i}", "join", str(invite), *options))
        follow(members, folder)
        return members


def follow(members: Sequence[Member], folder: Path) -> None:
    deadline = time.monotonic() + START_S + ROUND_S
    heard = 0
    while True:
        for number, member in enumerate(members):
            finished = any(True for _ in member.all("run_finished"))
            if member.process.poll() is not None and not finished:
                raise Failed(f"peer {number} ended early{last_words(folder / f'p{number}.log')}")
            if not finished:
                member.poll()
        if all(any(True for _ in member.all("run_finished")) for member in members):
            return
        commits = sum(1 for member in members for _ in member.all("round_committed"))
        if commits > heard:
            heard, deadline = commits, time.monotonic() + ROUND_S
        if time.monotonic() > deadline:
            raise Failed(f"no peer has committed a round for {ROUND_S:g} s (after {commits} commits)")
        time.sleep(SAMPLE_S)


def last_words(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return f" (last words: {lines[-1].strip()})" if lines else ""


def write_text(folder: Path) -> None:
    """Copy a part of the standard library; reading all of it would take most of the time."""
    folder.mkdir()
    size = 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size < TEXT_BYTES:
            shutil.copy(source, folder / f"{source.stem}.txt")
            size += source.stat().st_size
