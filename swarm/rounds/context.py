"""Everything that one member of a group needs to take part in rounds."""

from __future__ import annotations

from dataclasses import dataclass

from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host
from swarm.protocol.head import Member
from swarm.protocol.round_schedule import RoundSchedule
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.exchange.link_rates import LinkRates
from swarm.rounds.trainers.trainer import Trainer
from swarm.state.outer_state import OuterState
from swarm.state.snapshots import SnapshotStore


@dataclass(frozen=True)
class RoundContext:
    """One member of a group: its network host, its state and its trainer."""

    me: Member
    host: Host
    state: OuterState
    snapshots: SnapshotStore
    """The states that this peer serves to joiners."""
    trainer: Trainer
    schedule: RoundSchedule
    timeouts: AdaptiveTimeouts
    links: LinkRates

    @property
    def identity(self) -> Identity:
        """The key with which this member signs."""
        return self.host.identity

    @property
    def events(self) -> EventLog:
        return self.host.events
