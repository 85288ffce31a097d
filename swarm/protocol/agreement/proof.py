"""Proof of a head for a reader: a peer that takes no part in the group.

A head is proved by consecutive links from one that the coordinator has signed for: a start of term, an
endorsement, or, in `required` mode, a link with the coordinator's vote. How many peers report a head says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Final

import msgspec

from peer.bounds import Latest
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.agreement.records import links_in
from swarm.protocol.agreement.rules.electorate import Electorate
from swarm.protocol.agreement.rules.evidence import Evidence
from swarm.protocol.agreement.signing import Signer
from swarm.protocol.head import Head
from swarm.protocol.receipts import RECEIPT_KIND, ReceiptBody

PROOFS_KEPT: Final = 64
PROOF_LINKS_MAX: Final = 256  # in one message; an endorsement of every sixteenth head keeps proofs short

HeadProof = Annotated[tuple[ChainLink, ...], msgspec.Meta(max_length=PROOF_LINKS_MAX)]
"""Consecutive links, oldest first. The first one is signed for by the coordinator, the last one is of the proved
head."""


def prove(links: Mapping[bytes, ChainLink], head_hash: bytes, evidence: Evidence) -> tuple[ChainLink, ...]:
    """Return the proof of a head, from links by hash of their head: those from the last one that the coordinator has
    signed for, without votes that are not needed. Empty for the first head, or if links are missing."""
    later, name = list[ChainLink](), head_hash
    try:
        while (link := links.get(name)) is not None and len(later) < PROOF_LINKS_MAX:
            if (anchor := evidence.anchor(link)) is not None:
                chain = [anchor, *reversed(later)]
                pairs = zip(chain[1:], chain[:-1], strict=True)
                return (anchor, *(evidence.bare_certificate(after, before.head) for after, before in pairs))
            later.append(link)
            name = link.head.previous
    except ProtocolViolation:  # a damaged disk
        pass
    return ()


class StageProofs:
    """Checks heads of other stages of a pipeline by their proofs, each once, and receipts. Implements
    `swarm.protocol.receipts.OtherStages`. `groups`: by stage."""

    def __init__(self, groups: Mapping[int, AgreementConfig], signer: Signer) -> None:
        self._checkers = {stage: ProofChecker(config, signer) for stage, config in groups.items()}
        self._signer = signer
        self._checked: Latest[tuple[int, tuple[ChainLink, ...]], Head] = Latest(PROOFS_KEPT)

    def head(self, stage: int, links: tuple[ChainLink, ...]) -> Head:
        """Return the head of that stage which the links prove. Raises `ProtocolViolation`."""
        name = (stage, links)
        if name not in self._checked:
            if not links or stage not in self._checkers:
                raise ProtocolViolation("an empty proof, or one of a stage whose heads do not count here")
            self._checkers[stage].check(links[-1].head, links)
            self._checked[name] = links[-1].head
        return self._checked[name]

    def receipt(self, signed: Signed) -> ReceiptBody:
        """Check the signature and return the body. Raises `ProtocolViolation`."""
        return self._signer.open(signed, RECEIPT_KIND, ReceiptBody)


class ProofChecker:
    """Checks proofs of one group's heads, and makes them from records."""

    def __init__(self, config: AgreementConfig, signer: Signer) -> None:
        """Of the config only the group's facts count: its first head, coordinator and mode. `signer` signs
        nothing here."""
        self._genesis = config.genesis
        self._evidence = Evidence(signer, Electorate(config.mode), config)

    def prove(self, records: dict[str, bytes], head_hash: bytes) -> tuple[ChainLink, ...]:
        """Return the proof of a head from the records of a node (`Persist`); empty where they hold none."""
        return prove({record.link.head.hash: record.link for record in links_in(records)}, head_hash, self._evidence)

    def check(self, head: Head, proof: Sequence[ChainLink]) -> None:
        """Raise `ProtocolViolation` unless the links prove that head. The group's first head, round 0 without members,
        needs none."""
        if head == self._genesis:
            return
        if not proof or proof[-1].head != head:
            raise ProtocolViolation("a proof does not end at the head that it is for")
        if any(link.head.run_id != self._genesis.run_id for link in proof):
            raise ProtocolViolation("a proof has heads of another group")
        hashes = [link.head.hash for link in proof]  # before any signature, which takes longer
        if any(link.head.previous != name for link, name in zip(proof[1:], hashes[:-1], strict=True)):
            raise ProtocolViolation("a proof is no chain of consecutive heads")
        before: Head | None = None
        for link in proof:
            voters = link.head if before is None else before
            if len(link.votes) > len(voters.members) + 1:  # a proof holds no more than it needs
                raise ProtocolViolation("a proof has more votes than there are voters")
            if not self._evidence.link_counts(link, before):
                raise ProtocolViolation("a proof does not begin at what the coordinator has signed")
            before = link.head
