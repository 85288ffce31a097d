"""What a late joiner's fetch costs the rounds of the others, in real processes on 127.0.0.1.

    python benchmarks/late_join.py [--peers 3] [--params 8000000] [--compute 1.5] [--rounds 24] [--json FILE]

The members do rounds whose compute half is a pause of `--compute` seconds, as if a GPU did the work. In the middle of
the run a joiner fetches the state of the current head (8 bytes a parameter) from all of them, again and again for as
many rounds as were left alone before. `slowdown` compares the median round with and without it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
import trio

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.averaging_data import delta_of
from benchmarks.averaging_peer import PACE, NoTraining, Observer, diloco_state, take_part
from benchmarks.children import Child
from optim.outer import DilocoOuter
from optim.recipes.interface import Turn
from peer.errors import NetworkError
from peer.events import EventLog
from peer.host import HostConfig, open_host
from peer.identity import Identity
from swarm.chain import Member
from swarm.fetch import fetch_state
from swarm.follow import ask_standings
from swarm.plan import Assignment
from swarm.post import Post
from swarm.snapshots import SnapshotShelf
from swarm.tempo import Tempo
from swarm.trainer import Work

START_S, ROUND_S = 60.0, 60.0
WARM_UP = 3  # rounds


class Pausing(NoTraining):
    """Takes its time."""

    def __init__(self, delta: torch.Tensor, pause_s: float) -> None:
        super().__init__(delta)
        self._pause_s = pause_s
        self.speed = 1 / pause_s

    async def train(self, assignment: Assignment, turn: Turn, deadline_s: float) -> Work:
        await trio.sleep(self._pause_s)
        return await super().train(assignment, turn, deadline_s)


async def member(number: int, numel: int, pause_s: float, rounds: int, folder: Path) -> None:
    """One of the others, in a process of its own."""
    torch.set_num_threads(1)
    authority, identity = Identity.load_or_create(folder / "authority.key"), Identity.generate()
    log = EventLog()
    state = diloco_state(numel, "int8", DilocoOuter(lr=0.7, momentum=0.9))
    async with open_host(HostConfig(identity=identity, events=log)) as host, trio.open_nursery() as nursery:
        shelf = SnapshotShelf(state.size_bytes, 9 << 20)
        shelf.serve(host.rpc)
        me, trainer = Member(host.peer_id, str(number)), Pausing(delta_of(number, numel), pause_s)
        post = Post(me, identity, host, state, shelf, trainer, PACE, Tempo(), log)
        observer = Observer(post, rounds, True, folder)
        print(json.dumps({"peer": me.peer, "session": me.session, "addresses": host.addresses}), flush=True)
        await take_part(post, observer, authority, rounds, nursery)
        print(json.dumps({"seconds": observer.seconds}), flush=True)
        await trio.sleep_forever()  # others may still need us; whoever started us ends us


async def join(group: list[dict[str, Any]], numel: int, rounds: int, folder: Path) -> dict[str, Any]:
    """Fetch from the round in the middle of the run on, and say when that was."""
    peers = [hello["peer"] for hello in group]
    fetches: list[float] = []
    began = donors = 0.0
    async with open_host(HostConfig(identity=Identity.generate(), events=EventLog())) as host:
        for hello in group:
            host.book.add(hello["peer"], hello["addresses"])
        while True:
            await trio.sleep(0.2)
            standings = await ask_standings(host.rpc, peers)
            head = max((s.head for _, s in standings), key=lambda h: h.round, default=None)
            if head is None:
                continue  # they are still starting
            if head.round >= rounds - 1:
                return {"began": began, "ended": time.monotonic(), "fetches": fetches, "donors": donors}
            if head.round < rounds // 2:
                continue
            began = began or time.monotonic()
            try:
                got = await fetch_state(
                    host.rpc, lambda: peers, head.state_hash, 8 * numel, folder / "joiner.part", host.events
                )
            except NetworkError:
                continue  # the head has moved on
            fetches.append(got.seconds)
            donors = max(donors, len(got.donors))


def measure(peers: int, numel: int, pause_s: float, rounds: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name, ExitStack() as stack:
        folder = Path(name)
        children, group = [], []
        for number in range(peers):
            child = Child("benchmarks.late_join", "--member", number, numel, pause_s, rounds, folder)
            stack.callback(child.end)
            children.append(child)
            group.append(child.read(START_S))
        for child in children:
            child.tell({"group": group})
        joined = trio.run(join, group, numel, rounds, folder)
        seconds = [child.read(rounds * ROUND_S)["seconds"] for child in children]
    alone: list[float] = []
    beside: list[float] = []
    for commits in seconds:
        for earlier, later in list(pairwise(commits))[WARM_UP:]:
            if later < joined["began"]:
                alone.append(later - earlier)
            elif earlier > joined["began"] and later < joined["ended"]:
                beside.append(later - earlier)
    return {
        "peers": peers,
        "params": numel,
        "state_bytes": 8 * numel,
        "compute_s": pause_s,
        "round_s_alone": median(alone),
        "round_s_beside_a_fetch": median(beside),
        "slowdown": median(beside) / median(alone) - 1,
        "fetches": len(joined["fetches"]),
        "fetch_s": median(joined["fetches"]) if joined["fetches"] else None,
        "donors": joined["donors"],
        "cores": os.cpu_count(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--params", type=int, default=8_000_000)
    parser.add_argument("--compute", type=float, default=1.5, help="seconds that a round's training takes")
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    figures = measure(options.peers, options.params, options.compute, options.rounds)
    for name, value in figures.items():
        print(f"{name:24} {value:.3f}" if isinstance(value, float) else f"{name:24} {value}")
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--member"]:
        _, _, number, numel, pause, rounds, folder = sys.argv
        trio.run(member, int(number), int(numel), float(pause), int(rounds), Path(folder))
    else:
        main()
