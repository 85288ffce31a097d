"""Which samples a peer of a gossip run trains on: drawn without coordination, so that two peers hardly ever share one.

The endless sequence of sample numbers (`peer.data.corpus`) is cut into segments of `SLOTS` slots. In its n-th draw a
peer takes, of segment n, the slot that a hash of (run, peer, n) picks. So a peer never takes a number twice, two peers
in different draws never share one, and two in the same draw do with probability 1 / SLOTS each time. Slots that no peer
picks are skipped: a corpus is read in a random order anyway.
"""

from __future__ import annotations

from typing import Final

from blake3 import blake3

from swarm.protocol.ledger import Range

SLOTS: Final = 256


def draw(run_id: str, peer: str, number: int, count: int) -> tuple[Range, ...]:
    """Return the `count` samples of that peer's draw `number` (from 0); `count` is the same for all draws of a run."""
    digest = blake3(f"{run_id}/{peer}/{number}".encode(), derive_key_context="barnraise/1/gossip-samples").digest(8)
    slot = int.from_bytes(digest, "big") % SLOTS
    first = (number * SLOTS + slot) * count
    return ((first, first + count),)
