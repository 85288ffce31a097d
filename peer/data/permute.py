"""A keyed permutation of numbers, which needs no table."""

from __future__ import annotations

import hashlib


def permute(index: int, size: int, key: str) -> int:
    """Return the image of `index` in a keyed permutation of range(size), in O(1) memory.

    A four-round Feistel network over the smallest even number of bits that holds `size`, repeated until the result is
    inside (Black and Rogaway, "Ciphers with arbitrary finite domains"): under four times on average.
    """
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = index >> half_bits, index & mask
        for feistel_round in range(4):
            word = hashlib.blake2b(f"{key}:{feistel_round}:{right}".encode(), digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(word, "big") & mask)
        index = (left << half_bits) | right
        if index < size:
            return index
