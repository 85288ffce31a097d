"""Names of the pages with which a text begins: equal where all tokens up to the end of the page are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from peer.ipc.block_messages import PAGE_TOKENS

NAMES_MAX: Final = 1024


def page_names(tokens: Sequence[int]) -> tuple[bytes, ...]:
    """Return 16 bytes for each whole page; the last token has none, since it must be computed to be followed."""
    hasher, names = blake3(derive_key_context="barnraise/1/page-name"), list[bytes]()
    for end in range(PAGE_TOKENS, min(len(tokens) - 1, NAMES_MAX * PAGE_TOKENS) + 1, PAGE_TOKENS):
        hasher.update(b"".join(token.to_bytes(4, "little") for token in tokens[end - PAGE_TOKENS : end]))
        names.append(hasher.digest(16))
    return tuple(names)
