"""Real peers and a coordinator on hosts of their own, between which links can be cut; and what their events say."""

from __future__ import annotations

import math
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Final

import pytest
import trio

from benchmarks.common.shaped_lan import Unavailable
from tests.support.cuts import Cut, CutLan, cut_lan
from tests.support.peer_process import Fact, PeerProcess
from tests.swarm.support.swarm_harness import Swarm, open_swarm

RUN_TOML: Final = """
[run]
name = "partitions"
open = true
rounds = {rounds}
min_peers = {min_peers}
members_per_prefix = 64
coordinator = "MODE"

[model]
vocab_size = 256
hidden_size = 64
layers = 2
heads = 2
kv_heads = 1
intermediate_size = 128
max_seq_len = 128

[data]
seq_len = 128
source = "folder"

[inner]
lr = 4e-3
batch_size = 4
total_steps = 2000
warmup_steps = 10

{outer}
"""
BACK_S: Final = 30.0
"""From healing to the first commit of all, at most."""
FOUND_S: Final = 90.0  # so that a figure beyond its bound is told, not only that it is


@dataclass(frozen=True)
class Commit:
    """One round, as the first peer that committed it tells."""

    at: float
    fact: Fact

    @property
    def place(self) -> tuple[int, int]:
        """Term and round."""
        return place_of(self.fact)

    @property
    def members(self) -> int:
        return int(self.fact.fields["members"])

    @property
    def contributions(self) -> int:
        return int(self.fact.fields["contributions"])


class LanSwarm:
    """From `open_lan_swarm`."""

    def __init__(self, lan: CutLan, swarm: Swarm, names: Sequence[str]) -> None:
        self.lan, self.swarm, self.names = lan, swarm, tuple(names)

    @property
    def peers(self) -> list[PeerProcess]:
        """All but the coordinator, in order."""
        return list(self.swarm.peers.values())

    def named(self, names: Sequence[str]) -> list[PeerProcess]:
        return [self.swarm.peers[name] for name in names]

    async def cut(self, *cuts: Cut, loss: float = 0.0) -> float:
        """Swallow what goes along these, and no more; return when that had begun."""
        await trio.to_thread.run_sync(lambda: self.lan.cut(*cuts, loss=loss))
        return now_s()

    async def heal(self) -> float:
        return await self.cut()

    async def rounds(self, count: int, timeout_s: float = 300.0) -> None:
        """Until all peers have committed so many more rounds."""
        await self.swarm.committed(max(peer.round for peer in self.peers) + count, timeout_s=timeout_s)

    async def first_commit_of_all(self, since: float) -> float:
        """Return how long after `since` the last of all peers had committed a round again; infinity if one has not."""
        took = []
        for peer in self.peers:
            with trio.move_on_after(max(0.0, since + FOUND_S - now_s())):
                await peer.until(partial(has_committed, peer, since), "commit after healing", 2 * FOUND_S)
            took.append(min((fact.at - since for fact in committed_in(peer, since)), default=math.inf))
        return max(took)

    async def all_members(self, since: float) -> float:
        """Return how long after `since` a commit named all peers as members again; infinity if none has."""
        everybody = lambda fact: fact.fields["members"] == len(self.names)  # noqa: E731
        first = self.peers[0]
        found = lambda: [fact for fact in committed_in(first, since) if everybody(fact)]  # noqa: E731
        with trio.move_on_after(max(0.0, since + FOUND_S - now_s())):
            await first.until(lambda: bool(found()), "commit with all members", 2 * FOUND_S)
        return min((fact.at - since for fact in found()), default=math.inf)

    def commits(self, since: float = 0.0, until: float = math.inf) -> list[Commit]:
        """Return the rounds that were first committed in that time, in order."""
        first: dict[tuple[int, int], Commit] = {}
        for peer in self.peers:
            for fact in peer.commits:
                known = first.get(place_of(fact))
                if known is None or fact.at < known.at:
                    first[place_of(fact)] = Commit(fact.at, fact)
        return sorted((c for c in first.values() if since <= c.at <= until), key=lambda commit: commit.at)

    def round_s(self, since: float, until: float = math.inf) -> float:
        """Return the median time between two commits."""
        times = [commit.at for commit in self.commits(since, until)]
        return median([b - a for a, b in pairwise(times)] or [math.inf])

    def count(self, name: str, since: float, until: float = math.inf, peers: Sequence[PeerProcess] = ()) -> int:
        """Return how many events of that name the peers (default: all) have told in that time."""
        return sum(since <= fact.at <= until for peer in peers or self.peers for fact in peer.all(name))

    def terms(self) -> set[int]:
        """Return the terms in which rounds were committed."""
        return {commit.place[0] for commit in self.commits()}

    def check(self) -> None:
        """One history, no bug, and no honest peer penalized."""
        self.swarm.check_agreement()
        processes = self.swarm.processes()
        assert not [(peer.name, fact.fields) for peer in processes for fact in peer.all("peer_penalized")]


def has_committed(peer: PeerProcess, since: float) -> bool:
    return bool(committed_in(peer, since))


def committed_in(peer: PeerProcess, since: float, until: float = math.inf) -> list[Fact]:
    return [fact for fact in peer.commits if since <= fact.at <= until]


def place_of(fact: Fact) -> tuple[int, int]:
    return int(fact.fields["term"]), int(fact.fields["round"])


def now_s() -> float:
    """Return the time, as events tell it."""
    return time.time()


def sides(names: Sequence[str], first: int) -> tuple[Sequence[str], Sequence[str]]:
    """Return the first so many peers, and the others."""
    return names[:first], names[first:]


@asynccontextmanager
async def open_lan_swarm(
    folder: Path, peers: int, *, mode: str = "witness", rounds: int = 0, loss: float = 0.0
) -> AsyncIterator[LanSwarm]:
    """Open a run of so many members; they have committed the first round. `loss`: the share of all packets that is
    lost, from the start on. Skips the test where this machine cannot have such a network."""
    names = [f"p{number}" for number in range(peers)]
    toml = RUN_TOML.replace("MODE", mode)
    folder.mkdir(exist_ok=True)
    try:
        with cut_lan(names) as lan:
            lan.cut(loss=loss)
            opened = open_swarm(folder, rounds=rounds, min_peers=peers, run=toml, launch=lan.launch)
            async with opened as swarm:
                for name in names:
                    swarm.join(name)
                await swarm.committed(1)
                yield LanSwarm(lan, swarm, names)
    except Unavailable as reason:
        pytest.skip(str(reason))
