"""Where a peer takes part in rounds from, and what the run's manifest fixes about them."""

from __future__ import annotations

from dataclasses import dataclass

from optim.codecs import Codec
from peer.events import EventLog
from peer.host import Host
from peer.identity import Identity
from swarm.chain import Member
from swarm.outer_state import OuterState
from swarm.snapshots import SnapshotShelf
from swarm.tempo import Tempo
from swarm.trainer import Trainer


@dataclass(frozen=True)
class RoundSpec:
    """What the manifest fixes about rounds: `steps` inner steps (H) of `batch_size` sequences of `seq_len` tokens,
    within `compute_s_max` seconds; codecs up to a slice's owner and back down."""

    steps: int
    batch_size: int
    seq_len: int
    up: Codec
    down: Codec
    compute_s_max: float


@dataclass(frozen=True)
class Post:
    """Where a peer takes part in rounds from: who it is, its network, its state, what it lends to joiners, its
    trainer."""

    me: Member
    identity: Identity
    host: Host
    state: OuterState
    shelf: SnapshotShelf
    trainer: Trainer
    spec: RoundSpec
    tempo: Tempo
    events: EventLog
