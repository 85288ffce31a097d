"""The routing table: k-buckets of peers by distance, old and live ones preferred. Pure.

Why not libp2p's KadDHT or its RoutingTable, measured on 0.8.1: ids of killed peers stay in its answers (6-7 of 20; it
checks the table every 5 min). A lookup stalls 20 s on frozen peers. At most 2 peers of a /24 enter a bucket. A full
bucket pings an old peer inside `add_peer` without a deadline. Its protocol id is fixed, so runs would mix. Here, after
30 % of the nodes froze, the worst first read takes 1.3 s (hivemind: 3.0 s), later ones take as long as before, and no
dead peer stays (`benchmarks/dht.py`, tests/dht/test_faults.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from dht.key import bucket_index, nearest, node_key

BUCKET_SIZE: Final = 16
SPARES_PER_BUCKET: Final = 8


class RoutingTable:
    """Peers known to be alive, at most BUCKET_SIZE per power of two of distance, so that all near ones are known.

    A full bucket keeps its old peers: they are the likeliest to stay, and a flood of new identities cannot evict them.
    New peers become spares and wait until one is removed.
    """

    def __init__(self, own_peer_id: str) -> None:
        self._own_peer_id = own_peer_id
        self._own = node_key(own_peer_id)
        self._buckets: dict[int, dict[str, float]] = {}  # peer -> last heard, longest silent first
        self._spares: dict[int, dict[str, float]] = {}

    def __len__(self) -> int:
        return sum(len(bucket) for bucket in self._buckets.values())

    def __contains__(self, peer: str) -> bool:
        return peer in self._buckets.get(bucket_index(self._own, node_key(peer)), {})

    def __iter__(self) -> Iterator[str]:
        return (peer for bucket in self._buckets.values() for peer in bucket)

    def heard(self, peer: str, now: float) -> bool:
        """Note that a peer is alive. Returns whether it is new to the table."""
        index = bucket_index(self._own, node_key(peer))
        if peer == self._own_peer_id:
            return False
        bucket = self._buckets.setdefault(index, {})
        is_new = peer not in bucket
        if is_new and len(bucket) >= BUCKET_SIZE:
            _push(self._spares.setdefault(index, {}), peer, now, SPARES_PER_BUCKET)
            return False
        _push(bucket, peer, now, BUCKET_SIZE)
        return is_new

    def remove(self, peer: str) -> bool:
        """Replace a dead or unreachable peer by the latest spare. Returns whether it was in the table."""
        index = bucket_index(self._own, node_key(peer))
        bucket, spares = self._buckets.get(index, {}), self._spares.get(index, {})
        spares.pop(peer, None)
        if bucket.pop(peer, None) is None:
            return False
        if spares:
            spare, heard_at = spares.popitem()
            self._buckets[index] = dict(sorted({**bucket, spare: heard_at}.items(), key=lambda item: item[1]))
        elif not bucket:
            del self._buckets[index]
        return True

    def nearest(self, target: int, count: int) -> list[str]:
        """Return the `count` known peers nearest to a point, nearest first."""
        return nearest(target, self, count)

    def silent_since(self, before: float) -> list[str]:
        """Return the peers last heard before a time, longest silent first."""
        silent = [(heard_at, peer) for bucket in self._buckets.values() for peer, heard_at in bucket.items()]
        return [peer for heard_at, peer in sorted(silent) if heard_at < before]

    def occupied(self) -> list[int]:
        """Return the indices of the buckets that are not empty, farthest first."""
        return sorted(self._buckets, reverse=True)


def _push(bucket: dict[str, float], peer: str, now: float, size: int) -> None:
    """Move or append a peer to the fresh end; drop the stalest peer of a bucket that is over its size."""
    bucket.pop(peer, None)
    bucket[peer] = now
    if len(bucket) > size:
        del bucket[next(iter(bucket))]
