"""What the parts of a node share while it is at one head."""

from __future__ import annotations

from dataclasses import dataclass

from swarm.protocol.agreement.applicants import Applicants
from swarm.protocol.agreement.chain import Chain
from swarm.protocol.agreement.context import AgreementContext
from swarm.protocol.agreement.round.election_timeouts import ElectionTimeouts
from swarm.protocol.agreement.round.instance import Instance


@dataclass(frozen=True)
class RoundParts:
    """One node in the round after one head."""

    context: AgreementContext
    chain: Chain
    instance: Instance
    timeouts: ElectionTimeouts
    applicants: Applicants
