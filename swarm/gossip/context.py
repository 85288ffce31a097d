"""Where a peer takes part in a gossip run from, and what the run's manifest fixes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from peer.events import EventLog
from peer.net.host import Host
from swarm.gossip.pairing import PeerView
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.state.snapshots import SnapshotStore


@dataclass(frozen=True)
class GossipRules:
    """What the manifest fixes. `steps`: H; `constants`: alpha, beta, gamma; `genesis`: the hash of the initial weights,
    which `authority` can hand out; `rounds` 0: for ever."""

    run_id: str
    genesis: bytes
    authority: str
    steps: int
    batch_size: int
    seq_len: int
    rounds: int
    min_peers: int
    compute_s_max: float
    timeout_floor_s: float
    constants: tuple[float, float, float]


@dataclass(frozen=True)
class Trained:
    """`steps` inner steps on `samples` samples, mean `loss`; `delta`: phi less the local weights, flat fp32, shape
    (P,), valid until the next call."""

    steps: int
    samples: int
    loss: float
    delta: torch.Tensor


class GossipTrainer(Protocol):
    """Trains one replica. `speed` in inner steps a second, 0 until measured."""

    @property
    def speed(self) -> float: ...

    async def train(self, samples: tuple[Range, ...], first_step: int, steps: int, deadline_s: float) -> Trained:
        """`steps` inner steps from the weights last adopted, the first being number `first_step` of the run's schedule;
        fewer if `deadline_s` is over. `WorkerError` if the compute worker failed."""

    def adopt(self, theta: torch.Tensor) -> None:
        """Train from these outer weights from now on; they are copied."""


class GossipListener(Protocol):
    """Who knows the others and keeps what the engine makes (`swarm.gossip.peer`)."""

    def others(self) -> Mapping[str, PeerView]:
        """Live members of the run but us, as their records say."""

    def banned(self) -> Iterable[str]:
        """Whom the authority banned."""

    async def stepped(self, head: Head) -> None:
        """The replica has changed; it will not again until this returns."""


@dataclass(frozen=True)
class GossipContext:
    """One peer: who it is, its network, its worker, what it lends to joiners and where it keeps what it fetches."""

    me: Member
    host: Host
    trainer: GossipTrainer
    keeper: GossipListener
    timeouts: AdaptiveTimeouts
    snapshots: SnapshotStore
    part_file: Path
    events: EventLog
