"""Which samples a peer of a gossip run trains on: nobody hands them out, and two peers hardly ever take the same.

The endless line of sample numbers (`peer.data.corpus`) is cut into segments of `SLOTS` slots, a slot being one peer's
turn. In its n-th turn a peer takes, of segment n, the slot that a hash of (run, peer, n) picks. So a peer never takes
a number twice, two peers in different turns never share one, and two in the same turn do with probability 1 / SLOTS,
anew each time. What nobody picks is skipped: a corpus is read in a random order anyway.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from swarm.protocol.ledger import Range

SLOTS: Final = 256


def draw(run_id: str, peer: str, turn: int, count: int) -> tuple[Range, ...]:
    """The `count` samples of that peer's turn number `turn` (from 0); `count` is the same for all turns of a run."""
    digest = blake3(f"{run_id}/{peer}/{turn}".encode(), derive_key_context="barnraise/1/gossip-samples").digest(8)
    slot = int.from_bytes(digest, "big") % SLOTS
    first = (turn * SLOTS + slot) * count
    return ((first, first + count),)
