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

import shutil
import sys
import sysconfig
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio

from tests.simulation.histories.checks import check_histories
from tests.support.peer_process import POLL_S, PeerProcess
from tests.support.ports import free_port
from tests.support.process_group import Launch, ProcessGroup

TEXT_BYTES: Final = 1_000_000

RUN_TOML: Final = """
[run]
name = "harness"
open = true
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
WITNESS: Final = RUN_TOML.replace("[run]", '[run]\ncoordinator = "witness"', 1)
"""Rounds go on without the coordinator, and a person ends a lost majority."""


class Swarm:
    """Made by `open_swarm`. `peers`: every peer ever started but the coordinator, by name."""

    def __init__(
        self, folder: Path, run_toml: str, launch: Callable[[str], Launch] | None = None, data: Path | None = None
    ) -> None:
        self.folder = folder
        self._text = () if data or "\nchats = " in run_toml else ("--data", str(folder / "text"))
        self.peers: dict[str, PeerProcess] = {}
        at_coordinator = Launch(f"/ip4/127.0.0.1/tcp/{free_port()}")
        launched = launch or (lambda name: at_coordinator if name == "coordinator" else Launch())
        self.group = ProcessGroup(folder, launched)
        run_file = folder / "run.toml"
        run_file.write_text(run_toml)
        self.coordinator = self.group.start(
            "coordinator", ["coordinate", str(run_file), *(("--data", str(data)) if data else ())]
        )

    @property
    def invite(self) -> Path:
        return self.coordinator.home / "invite"

    def join(self, name: str, *options: str, fault: str = "", invite: Path | None = None) -> PeerProcess:
        """Start a peer. `fault`: a BARNRAISE_FAULT such as "kill:before_vote:3"; `invite`: a file with another one than
        the coordinator's."""
        fixed = ("--threads", "1", *self._text)
        arguments = ["join", str(invite or self.invite), "--name", name, *fixed, *options]
        self.peers[name] = self.group.start(name, arguments, fault)
        return self.peers[name]

    def restart(self, peer: PeerProcess, fault: str = "") -> None:
        """Start a peer (or the coordinator) that has ended again, with the same home; its facts go on."""
        self.group.restart(peer, fault)

    async def wait_invite(self, timeout_s: float = 300.0) -> None:
        """Until the coordinator has written its invite."""
        with trio.move_on_after(timeout_s):
            while self.coordinator.alive and not self.invite.exists():
                await trio.sleep(POLL_S)
        assert self.invite.exists(), f"the coordinator gave no invite.\n{self.coordinator.transcript()}"

    async def committed(self, round_number: int, *peers: PeerProcess, timeout_s: float = 300.0) -> None:
        """Until each of `peers` (default: all that live) stands at `round_number` or later."""
        for peer in peers or tuple(self.living()):
            await peer.until(partial(_stands_at, peer, round_number), f"round {round_number}", timeout_s)

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
        """Judge all that was committed: one history, along one chain, each round once; and no peer reported a bug."""
        check_histories([peer.home for peer in self.processes()])

    def transcript(self) -> str:
        return "\n".join(f"== {peer.name}\n{peer.transcript(15)}" for peer in self.processes())


@asynccontextmanager
async def open_swarm(
    folder: Path,
    *,
    rounds: int = 0,
    min_peers: int = 2,
    steps: int = 20,
    outer: str = "",
    run: str = RUN_TOML,
    launch: Callable[[str], Launch] | None = None,
    data: Path | None = None,
) -> AsyncIterator[Swarm]:
    """A coordinator whose invite is ready. The end of the block judges the run's history. `steps`: inner steps a round;
    `rounds` 0 trains until the block is left. `outer`: sections of RUN.toml for another method than DiLoCo; `run`: the
    whole file, to be filled in as `RUN_TOML` is. `launch`: how the process of that name is started, if not on
    127.0.0.1. `data`: a data set that the coordinator has and the peers fetch, in place of text; so
    do they where `run` names chats."""
    text = folder / "text"
    text.mkdir()
    if data is None:
        write_text(text)
    toml = run.format(rounds=rounds, min_peers=min_peers, outer=outer or f"[outer]\nsteps = {steps}")
    swarm = Swarm(folder, toml, launch, data)
    try:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(swarm.group.run)
            await swarm.wait_invite()
            try:
                yield swarm
                swarm.check_agreement()
            except Exception:
                sys.stderr.write(swarm.group.ended())  # pytest shows it with the failure
                raise
            nursery.cancel_scope.cancel()
    finally:
        with trio.CancelScope(shield=True):
            await swarm.group.end_all()


def _stands_at(peer: PeerProcess, round_number: int) -> bool:
    return peer.round >= round_number


def write_text(folder: Path) -> None:
    """A little of the standard library: reading all of it would be most of a short test."""
    size = 0
    for source in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        if size < TEXT_BYTES:
            shutil.copy(source, folder / f"{source.stem}.txt")
            size += source.stat().st_size
