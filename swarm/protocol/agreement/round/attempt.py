"""What the leader of an attempt has collected."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.round.instance import Exchange
from swarm.protocol.head import Member
from swarm.protocol.plan import Contribution, WorkPlan

TIMER: Final = "step"  # of the present phase


class Phase(Enum):
    """What the leader waits for."""

    ASSEMBLE = "the voters of this head"
    PREPARE = "promises"
    COLLECT = "contributions"
    EXCHANGE = "the built state"
    PROPOSE = "votes"


@dataclass
class Attempt:
    """One attempt of this node."""

    number: int
    phase: Phase = Phase.PREPARE
    asked: tuple[str, ...] = ()
    present: dict[Member, float] = field(default_factory=dict)
    """Peers that take part, with their speeds: those that have promised, or in the first attempt voted for its head."""
    promises: dict[Member, msg.PromiseMessage] = field(default_factory=dict)
    accepted: dict[Member, msg.AcceptedValue | None] = field(default_factory=dict)
    joins: dict[Member, Signed] = field(default_factory=dict)
    plan: WorkPlan | None = None
    signed_plan: Signed | None = None
    informed: set[Member] = field(default_factory=set)
    """Peers that say that they have the plan."""
    contributions: dict[Member, tuple[Signed, Contribution]] = field(default_factory=dict)
    unusable: set[Member] = field(default_factory=set)
    """Members whose contribution is invalid."""
    took_s: dict[Member, float] = field(default_factory=dict)
    end_at: float = 0.0
    finishing_early: bool = False
    late_until: float = 0.0
    """Until when newcomers that have not promised are waited for; 0 while others are."""
    signed_roster: Signed | None = None
    exchange: Exchange | None = None
    proposal: msg.ProposalMessage | None = None
