"""Where a peer takes part in rounds from."""

from __future__ import annotations

from dataclasses import dataclass

from peer.events import EventLog
from peer.host import Host
from peer.identity import Identity
from swarm.chain import Member
from swarm.outer_state import OuterState
from swarm.pace import Pace
from swarm.snapshots import SnapshotShelf
from swarm.tempo import Tempo
from swarm.trainer import Trainer


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
    pace: Pace
    tempo: Tempo
    events: EventLog
