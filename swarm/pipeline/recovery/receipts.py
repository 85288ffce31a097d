"""Receipts between two stages (`swarm.protocol.receipts`): given for gradients taken, and asked for by those that gave
them.

For each of its contributions a replica asks every peer that has sent it a part of that. So a round costs a call and a
signature for each pair of peers, whatever passes between them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from typing import Final

import trio

from peer.bounds import Latest
from peer.errors import BarnraiseError
from peer.identity import Signed, open_body, sign_body
from peer.net.host import Host
from peer.net.method import Call
from peer.net.rpc import ask_each
from swarm.pipeline.messages import RECEIPT, AskReceipt, Receipt
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, contains, union
from swarm.protocol.receipts import (
    RECEIPT_KIND,
    RECEIPT_RANGES_MAX,
    RECEIPTS_MAX,
    ReceiptBody,
    StageProof,
    latest,
)

KEPT: Final = 1 << 16  # micro-batches whose replica is remembered
ASK_S: Final = 1.0  # for all receipts of a contribution
PROVE_S: Final = 2.0

ProveHead = Callable[[int], Awaitable[StageProof]]
"""Returns the proof of the newest head of a stage that peers report; empty while there is none."""


class ReceiptBook:
    """One replica's receipts. `stage`: its own; `prove` proves heads of other stages."""

    def __init__(self, host: Host, stage: int, micro_batch: int, prove: ProveHead) -> None:
        self._host, self._stage, self._micro_batch, self._prove = host, stage, micro_batch, prove
        self._taken = Latest[int, str](KEPT)  # whose gradient came last, by first sample
        self._senders = Latest[int, str](KEPT)  # whose micro-batch was counted, by first sample

    def took(self, samples: Range, peer: str) -> None:
        """Note that the gradient of a micro-batch came from this peer of the next stage."""
        self._taken[samples[0]] = peer

    def counted(self, samples: Range, peer: str) -> None:
        """Note that a micro-batch that this peer of the stage before has sent was counted here."""
        self._senders[samples[0]] = peer

    async def give(self, call: Call[AskReceipt]) -> Receipt:
        """Sign for the gradients taken from the caller."""
        ranges = latest(self._taken, call.peer, call.body.ranges, self._micro_batch)
        return Receipt(sign_body(self._host.identity, RECEIPT_KIND, ReceiptBody(call.body.head, call.peer, ranges)))

    async def ask(self, head: Head, counted: Sequence[Range]) -> tuple[tuple[Signed, ...], StageProof]:
        """Return the receipts for what was counted since `head`, and the proof that their signers are in the stage
        before, where `head` does not know them all."""
        wanted: dict[str, list[Range]] = {}
        for first, end in counted:
            for at in range(first, end, self._micro_batch):
                if at in self._senders:
                    wanted.setdefault(self._senders[at], []).append((at, at + self._micro_batch))
        asked = {
            peer: AskReceipt(head.hash, union(wanted[peer])[:RECEIPT_RANGES_MAX])
            for peer in sorted(wanted)[:RECEIPTS_MAX]
        }
        found: dict[str, Signed] = {}
        for peer, reply in (await ask_each(self._host.rpc, RECEIPT, asked, ASK_S)).items():
            with suppress(BarnraiseError):
                body = open_body(reply.receipt, RECEIPT_KIND, ReceiptBody)
                ours = reply.receipt.signer == peer and body == ReceiptBody(head.hash, self._host.peer_id, body.ranges)
                if ours and body.ranges and contains(asked[peer].ranges, body.ranges):
                    found[peer] = reply.receipt
        proof: StageProof = ()
        if not found.keys() <= set(head.senders):
            with trio.move_on_after(PROVE_S):
                proof = await self._prove(self._stage - 1)
        return tuple(found[peer] for peer in sorted(found)), proof
