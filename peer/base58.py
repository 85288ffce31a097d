"""Base58: bytes as letters and digits alone, without 0, O, I and l, which look alike.

A text has as many letters as the largest number of that many bytes needs, so each length of bytes has a length of text
of its own, and each bytes have one text. libp2p's base58 counts leading zeros in another way, and makes the same text
of an Ed25519 peer's id.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Final

_LETTERS: Final = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"
_BITS: Final = log2(len(_LETTERS))  # of one letter


def base58_length(count: int) -> int:
    """Return the letters of `count` bytes."""
    return ceil(8 * count / _BITS)


def to_base58(raw: bytes) -> str:
    """Return `raw` as text. Takes a time that grows with the square of its length."""
    number, letters = int.from_bytes(raw, "big"), list[str]()
    for _ in range(base58_length(len(raw))):
        number, digit = divmod(number, len(_LETTERS))
        letters.append(_LETTERS[digit])
    return "".join(reversed(letters))


def from_base58(text: str) -> bytes:
    """Return the bytes that `to_base58` gives this text. Raises ValueError for any text that it never gives."""
    number = 0
    for letter in text:
        digit = _LETTERS.find(letter)
        if digit < 0:
            raise ValueError(f"{letter!r} is no letter of base58")
        number = number * len(_LETTERS) + digit
    count = int(len(text) * _BITS / 8)
    if base58_length(count) != len(text):
        raise ValueError(f"no bytes have {len(text)} letters")
    if number >> (8 * count):
        raise ValueError("the number is larger than its bytes")
    return number.to_bytes(count, "big")
