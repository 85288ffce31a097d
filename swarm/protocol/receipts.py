"""Receipts: which peer of a pipeline's stage the stage before has taken gradients from.

A later stage is assigned no samples, so what its members claim is their own word. The peer that took the gradient of a
micro-batch, and put it into its own work, says whose it was. It signs that for one contribution: for the samples of one
peer, after one head of that peer's group. A hash of the gradient would prove no more, since no third peer can make it
again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Final, Protocol

import msgspec

from peer.bounds import MEMBERS_MAX, Hash, Name
from peer.errors import ProtocolViolation
from peer.identity import Signed
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range, common, union

RECEIPT_KIND: Final = "receipt"
RECEIPT_RANGES_MAX: Final = 4096
RECEIPTS_MAX: Final = MEMBERS_MAX  # in one contribution: one of each peer of the stage before
PROOF_MAX: Final = 64  # links

Receipts = Annotated[tuple[Signed, ...], msgspec.Meta(max_length=RECEIPTS_MAX)]
StageProof = Annotated[tuple[ChainLink, ...], msgspec.Meta(max_length=PROOF_MAX)]


class ReceiptBody(msgspec.Struct, frozen=True):
    """Its signer has taken these samples' gradients from `peer`."""

    head: Hash
    """The last head of the group of `peer`: the receipt counts for the round after it."""
    peer: Name
    ranges: Annotated[tuple[Range, ...], msgspec.Meta(max_length=RECEIPT_RANGES_MAX)]


class OtherStages(Protocol):
    """Checks what contributions bring from other stages. The methods raise `ProtocolViolation`."""

    def head(self, stage: int, links: StageProof) -> Head:
        """Return the head of that stage which the links prove."""

    def receipt(self, signed: Signed) -> ReceiptBody:
        """Check the signature and return the body."""


class NoStages:
    """The `OtherStages` of a run that is not a pipeline."""

    def head(self, stage: int, links: StageProof) -> Head:
        raise ProtocolViolation("a proof of another stage's head in a run without stages")

    def receipt(self, signed: Signed) -> ReceiptBody:
        raise ProtocolViolation("a receipt in a run without stages")


NO_STAGES: Final = NoStages()


def names_of(members: Collection[Member]) -> tuple[str, ...]:
    """Return the peers of these members, in order."""
    return tuple(sorted({member.peer for member in members}))


def receipted(
    counted: Sequence[Range],
    receipts: Sequence[Signed],
    open_receipt: Callable[[Signed], ReceiptBody],
    senders: Collection[str],
) -> tuple[Range, ...]:
    """Return what of `counted` peers of the stage before, `senders`, have given receipts for."""
    return common(counted, union(r for one in receipts if one.signer in senders for r in open_receipt(one).ranges))


def latest(taken: Mapping[int, str], peer: str, asked: Sequence[Range], micro_batch: int) -> tuple[Range, ...]:
    """Return the micro-batches in `asked` that were last taken from `peer`. `taken`: by first sample."""
    mine = union((first, first + micro_batch) for first, giver in taken.items() if giver == peer)
    return common(mine, asked)[:RECEIPT_RANGES_MAX]
