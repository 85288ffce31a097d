"""Context shared by the parts of one node: its identity, the rules, the time of the present step and its output."""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from peer.errors import ProtocolViolation
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.output import Output
from swarm.protocol.agreement.rules.electorate import Electorate
from swarm.protocol.agreement.rules.evidence import Evidence
from swarm.protocol.agreement.signing import Signer
from swarm.protocol.agreement.work import Work
from swarm.protocol.head import Head, Member
from swarm.protocol.roster_room import RosterRoom

KNOWN_MAX: Final = 4096


class AgreementContext:
    """One node's surroundings. `now` is the time of the present step."""

    def __init__(self, config: AgreementConfig, signer: Signer, work: Work) -> None:
        self.config, self.signer, self.work = config, signer, work
        self.electorate = Electorate(config.mode)
        self.evidence = Evidence(signer, self.electorate, config)
        self.out = Output(config.peer)
        self.now = 0.0
        self.me = Member(config.peer, "")
        """This node as a voter. The session is its incarnation; the coordinator's is its boot id, or fixed if
        required."""
        self.seed = b""
        self.mute = False
        """A coordinator whose disk was put back from a backup: it votes and starts nothing before the operator's
        regroup."""
        self.down: set[str] = set()
        """Peers that the failure detector suspects."""
        self.judged: frozenset[str] = frozenset()
        """Peers whose contributions this node leaves out where it leads."""
        self.known: dict[str, None] = {}
        """Peers of the run that were seen, in order, besides those in the head."""

    def roster_room(self, head: Head, head_hash: bytes) -> RosterRoom:
        """Return the room in a roster of the round after this head."""
        return RosterRoom(head, head_hash, self.work.slices(head), self.config.roster_bytes)

    def know(self, peer: str) -> None:
        """Remember this peer of the run."""
        if peer != self.config.peer and (peer in self.known or len(self.known) < KNOWN_MAX):
            self.known[peer] = None

    def pick(self, *purpose: bytes) -> int:
        """Return a number that no other peer can guess, the same for the same purpose."""
        return int.from_bytes(blake3(b"".join((self.seed, *purpose))).digest()[:6], "big")

    def blame(self, peer: str, error: ProtocolViolation) -> None:
        """Accuse the only peer that can have caused this error."""
        self.out.accuse(peer, str(error))
