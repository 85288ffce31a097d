"""Where a peer takes part in rounds from."""

from __future__ import annotations

from dataclasses import dataclass

from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host
from swarm.protocol.head import Member
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainer import Trainer
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore


@dataclass(frozen=True)
class RoundContext:
    """Where a peer takes part in rounds from: who it is, its network, its state, what it lends to joiners, its
    trainer."""

    me: Member
    identity: Identity
    host: Host
    state: OuterState
    snapshots: SnapshotStore
    trainer: Trainer
    schedule: RoundSchedule
    timeouts: AdaptiveTimeouts
    events: EventLog
