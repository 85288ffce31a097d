"""Everything that one member of a group needs to take part in rounds."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

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

UNKNOWN: Final = Member("", "")


@dataclass(frozen=True)
class RoundContext:
    """One member of a group: its network host, its state and its trainer."""

    host: Host
    state: OuterState
    snapshots: SnapshotStore
    """The states that this peer serves to joiners."""
    trainer: Trainer
    schedule: RoundSchedule
    timeouts: AdaptiveTimeouts
    folder: Path
    """Where records, results and partial fetches lie."""
    me: Member = UNKNOWN
    """This peer as a voter. `restore_replica` finds its incarnation in the records."""
    links: LinkRates = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "links", LinkRates(self.host))

    @property
    def identity(self) -> Identity:
        """The key with which this member signs."""
        return self.host.identity

    @property
    def events(self) -> EventLog:
        return self.host.events
