"""The messages that the leader of an attempt has collected."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from blake3 import blake3

from peer.identity import Signed
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.round.instance import Exchange
from swarm.protocol.head import Member
from swarm.protocol.plan import Contribution, WorkPlan

TIMER: Final = "step"  # of the present phase
DIRECT_MAX: Final = 8  # peers to which a leader itself sends rosters, and proposals with them
SLOW_BITS_S: Final = 20e6  # up, of a link that still takes part well: a home's


class Phase(Enum):
    """The phase of an attempt: what its leader waits for."""

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
    present: dict[Member, msg.Measurements] = field(default_factory=dict)
    """Participating peers with their measurements: those that have promised, or in the first attempt voted for its
    head."""
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
    exchanging: set[str] = field(default_factory=set)
    """Peers that say that they have the roster."""
    answers_at: float = -1.0
    """When those to whom roster or proposal were sent last may all have answered."""
    proposal: msg.ProposalMessage | None = None


def answers_s(size: int, poll_s: float) -> float:
    """Return the seconds that an answer to this number of bytes may take over a slow link, and half a poll at least."""
    return max(poll_s / 2, 8 * size / SLOW_BITS_S)


def spread(peers: Iterable[str], head_hash: bytes) -> dict[str, tuple[str, ...]]:
    """Return to which peers a leader sends a roster, and to which others each of these passes it on: about the square
    root of their number each, in an order that changes with the head. Few peers get it from the leader."""
    order = sorted(peers, key=lambda peer: blake3(head_hash + peer.encode()).digest())
    first = len(order) if len(order) <= DIRECT_MAX else math.isqrt(len(order))
    return {peer: tuple(order[first + i :: first]) for i, peer in enumerate(order[:first])}
