"""The configuration of a node: its group, its part in it, and how long to wait."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peer.bounds import MEMBERS_MAX
from swarm.protocol.head import Head
from swarm.protocol.roster_room import ROSTER_BYTES_MAX

Mode = Literal["witness", "required"]
"""The votes that make a certificate.

- `witness`: a majority of the members, of which an even number has the coordinator as one more voter. A liar among
  them can make two histories.
- `required`: a majority of the members, and the coordinator."""


@dataclass(frozen=True, kw_only=True)
class AgreementConfig:
    """One node's group and part. Times are in seconds; none carries safety."""

    genesis: Head
    """The head of round 0, without members; its run id is the group's."""
    peer: str
    """This node's peer id."""
    coordinator: str
    """The coordinator's peer id."""
    credential: bytes = b""
    """The credential that admits this peer to a closed run."""
    mode: Mode = "witness"
    lone_survivor: bool = False
    """Whether a required coordinator continues by itself with one member of a group that had three or more."""
    rounds: int = 0
    """The run is complete after this many; 0: it has no end."""
    min_peers: int = 1
    """The group begins once this many peers wait for it, where `Work.may_begin` says nothing else."""
    max_peers: int = MEMBERS_MAX
    """Members and learners of a head at most."""
    roster_bytes: int = ROSTER_BYTES_MAX
    """Signed contributions of a round at most; the same for all of the group."""
    poll_s: float = 1.0
    """Between two status messages, and before a message is repeated."""
    attempt_s: float = 3.0
    """A leader's time to begin; it grows by half with each leader given up, to `attempt_max_s` or two rounds."""
    attempt_max_s: float = 6.0
    grace_s: float = 0.5
    """A leader waits this long for promises beyond a quorum."""
    finish_s: float = 8.0
    """A leader waits this long for members that it has asked to finish their step, encode and submit what they have."""
    ask_s: float = 2.0
    """The coordinator waits this long for answers before it starts a term."""
    begin_s: float = 0.0
    """The coordinator of a group without a head waits this long for peers that have one, before it begins the group: if
    its disk was restored from a backup, they report theirs."""
    lost_s: float = 30.0
    """A quorum that has not answered the coordinator for this long, or three rounds if that is less, is lost."""
    stalled_s: float = 600.0
    """Nothing was committed for this long, though members answer: the operator is warned; a required coordinator starts
    a term. At least ten rounds; doubled while that does not help."""
    undo_s: float = 600.0
    """No peer has brought the last state for this long: a required coordinator starts a term from an older one. Doubled
    while that does not help."""

    @property
    def is_coordinator(self) -> bool:
        return self.peer == self.coordinator
