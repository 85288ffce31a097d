"""Names of the pages with which a text begins: equal where all tokens up to the end of the page are, and the type of
hidden states on the wire."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from blake3 import blake3

from peer.ipc.block_messages import PAGE_TOKENS, WireType

NAMES_MAX: Final = 1024


def page_names(tokens: Sequence[int], wire: WireType | None = None) -> tuple[bytes, ...]:
    """Return 16 bytes for each whole page; the last token has none, since it must be computed to be followed. `wire`:
    the type that the session has chosen for hidden states, which rounds what is computed from them."""
    hasher, names = blake3(derive_key_context="barnraise/1/page-name"), list[bytes]()
    hasher.update((wire or "").encode())
    for end in range(PAGE_TOKENS, min(len(tokens) - 1, NAMES_MAX * PAGE_TOKENS) + 1, PAGE_TOKENS):
        hasher.update(b"".join(token.to_bytes(4, "little") for token in tokens[end - PAGE_TOKENS : end]))
        names.append(hasher.digest(16))
    return tuple(names)
