"""What an authority is told about one group: its rules, and how long to wait before it acts."""

from __future__ import annotations

from dataclasses import dataclass

from peer.bounds import MEMBERS_MAX
from swarm.protocol.head import Head


@dataclass(frozen=True, kw_only=True)
class GroupRules:
    """What a run's manifest fixes for one group: the whole run, or the replicas of one stage."""

    genesis: Head
    """The head of round 0; its run id is the group's id."""
    stage: int | None = None
    """The stage's number in a pipeline; None where the group is the whole run."""
    rounds: int = 0
    """The run is complete after this many; 0: it has no end."""
    min_peers: int = 1
    """The run starts once this many peers wait or take part, in all groups together."""
    max_peers: int = MEMBERS_MAX
    """The largest group that the authority forms."""
    members_per_prefix: int = MEMBERS_MAX
    """Members of one address prefix in it at most."""


@dataclass(frozen=True, kw_only=True)
class RegroupTimeouts:
    """How long an authority waits, in seconds."""

    poll_s: float = 1.0
    """Between two looks at the group."""
    join_request_s: float = 6.0
    """A join request counts this long."""
    gone_s: float = 6.0
    """A majority must be missing this long: a frozen machine may thaw, a link may come back."""
    dead_s: float = 0.5
    """The same where the missing peers closed their connections, cannot continue alone and are missed by the rest."""
    lost_s: float = 20.0
    """Before the run goes back to an earlier round: a peer with a later one may still answer."""
    strangers_s: float = 600.0
    """After this long without an answer from a known peer, heads of strangers count in a stage."""
