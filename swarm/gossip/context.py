"""Context of a peer in a gossip run, and the settings fixed by the run's manifest."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from peer.net.host import Host
from swarm.gossip.pairing import PeerView
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainers.trainer import TrainResult
from swarm.state.snapshots import SnapshotStore


@dataclass(frozen=True)
class GossipRules:
    """Settings fixed by the manifest of a gossip run."""

    run_id: str
    genesis: bytes
    """The hash of the initial weights."""
    authority: str
    """The peer that serves the initial weights."""
    steps: int
    """H, the inner steps of a round."""
    batch_size: int
    seq_len: int
    rounds: int
    """0: no end."""
    min_peers: int
    compute_s_max: float
    timeout_floor_s: float
    constants: tuple[float, float, float]
    """alpha, beta, gamma."""


class GossipTrainer(Protocol):
    """Trains one replica."""

    @property
    def speed(self) -> float:
        """Inner steps a second, 0 until measured."""

    async def train(self, samples: tuple[Range, ...], first_step: int, steps: int, deadline_s: float) -> TrainResult:
        """Make `steps` inner steps from the weights last adopted, the first being number `first_step` of the run's
        schedule; fewer if `deadline_s` is over. Raises WorkerError if the compute worker failed,
        and Diverged if its steps have been of no use for several rounds."""

    def adopt(self, theta: torch.Tensor) -> None:
        """Copy these outer weights, and train from them from now on."""


class GossipListener(Protocol):
    """Knows the other peers, and receives each step (`swarm.gossip.peer`)."""

    def others(self) -> Mapping[str, PeerView]:
        """Return the other live members of the run, as their records say."""

    def banned(self) -> Iterable[str]:
        """Return the peers that the authority has banned."""

    async def working(self) -> None:
        """Wait until this machine's owner lets it train."""

    async def stepped(self, head: Head) -> None:
        """Note that the replica has changed; it does not change again until this returns."""


@dataclass(frozen=True)
class GossipContext:
    """The parts with which one peer takes part in a gossip run."""

    me: Member
    host: Host
    trainer: GossipTrainer
    listener: GossipListener
    timeouts: AdaptiveTimeouts
    snapshots: SnapshotStore
    """Serves this peer's weights to joiners."""
    part_file: Path
    """Holds a state while it is fetched."""
