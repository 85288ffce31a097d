"""The key space: 256-bit numbers for nodes and records, with XOR as the distance (Kademlia, 2002).

Both are SHA-256 hashes, so a node can choose its position only by hashing until one fits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import Final

KEY_BITS: Final = 256
KEY_BYTES: Final = KEY_BITS // 8


@lru_cache(maxsize=8192)
def node_key(peer_id: str) -> int:
    """Return a node's position: the hash of its peer id, the same in every namespace."""
    return int.from_bytes(hashlib.sha256(b"barnraise/dht/node\0" + peer_id.encode()).digest(), "big")


@lru_cache(maxsize=1024)
def record_key(namespace: str, schema: str, key: str) -> bytes:
    """Return the position of a key's records, 32 bytes. Lengths are hashed too, so no two triples collide."""
    image = hashlib.sha256(b"barnraise/dht/record\0")
    for part in (namespace, schema, key):
        encoded = part.encode()
        image.update(len(encoded).to_bytes(4, "big") + encoded)
    return image.digest()


def as_int(key: bytes) -> int:
    """Return a wire key as a point of the space."""
    return int.from_bytes(key, "big")


def as_bytes(point: int) -> bytes:
    """Return a point of the space as a wire key, 32 bytes."""
    return point.to_bytes(KEY_BYTES, "big")


def distance(a: int, b: int) -> int:
    """Return the XOR distance: a metric, with exactly one point at each distance from another."""
    return a ^ b


def bucket_index(own: int, other: int) -> int:
    """Return the number of the k-bucket of `other` as seen from `own`: the bit length of their distance."""
    return distance(own, other).bit_length()


def nearest(target: int, peers: Iterable[str], count: int) -> list[str]:
    """Return the `count` peers nearest to `target`, nearest first."""
    return sorted(peers, key=lambda peer: distance(node_key(peer), target))[:count]
