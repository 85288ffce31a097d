"""Rebalancing policies side by side: none, SWARM's algorithm 2, ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from random import Random
from typing import Protocol

from swarm.placement.load import LoadView, PeerLoad
from swarm.placement.rebalance import Move, RebalanceConfig, decide, stage_for_joiner


class Policy(Protocol):
    """A rebalancing policy. Each peer publishes its load once a period, and `moves` is called as often."""

    name: str

    def period_s(self, peers: int) -> float: ...
    def join(self, view: LoadView, joiner: PeerLoad) -> int | None: ...
    def moves(self, view: LoadView) -> Sequence[Move]: ...


class NoRebalancing:
    """Joiners take a random stage and stay there."""

    name = "none"

    def __init__(self, seed: int = 0) -> None:
        self._random = Random(seed)

    def period_s(self, peers: int) -> float:
        return math.inf

    def join(self, view: LoadView, joiner: PeerLoad) -> int | None:
        return self._random.randrange(len(view.stages))

    def moves(self, view: LoadView) -> Sequence[Move]:
        return ()


class SwarmPeriodic:
    """SWARM (arXiv 2301.11913, algorithm 2): every `period_s` all peers publish their queue sizes, and the peer with
    the shortest queue of the least loaded stage moves to the most loaded one. Joiners take the most loaded one, too.
    Here queues rank the stages by throughput without error or ties. That favours the policy: real queues are empty at
    all stages but the slowest."""

    def __init__(self, period_s: float) -> None:
        self.name = f"every {period_s:.0f} s"
        self._period_s = period_s

    def period_s(self, peers: int) -> float:
        return self._period_s

    def join(self, view: LoadView, joiner: PeerLoad) -> int | None:
        throughputs = view.throughputs()
        return throughputs.index(min(throughputs))

    def moves(self, view: LoadView) -> Sequence[Move]:
        throughputs = view.throughputs()
        rich, poor = throughputs.index(max(throughputs)), throughputs.index(min(throughputs))
        movable = [load for load in view.peers if load.stage == rich and not view.in_flight(load)]
        if rich == poor or not movable:
            return ()
        # Work is shared in proportion to speed, so queues differ by noise only: take the first by id.
        return (Move(movable[0].peer, rich, poor, 0.0),)


class Barnraise:
    """The policy of `swarm.placement.rebalance`."""

    name = "ours"

    def __init__(self, config: RebalanceConfig | None = None) -> None:
        self.config = config or RebalanceConfig()

    def period_s(self, peers: int) -> float:
        return self.config.period_s(peers)

    def join(self, view: LoadView, joiner: PeerLoad) -> int | None:
        return stage_for_joiner(view, joiner)

    def moves(self, view: LoadView) -> Sequence[Move]:
        return decide(view, self.config)
