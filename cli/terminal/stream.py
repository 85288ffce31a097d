"""Text that appears piece by piece, as an answer does while it is generated."""

from __future__ import annotations

from cli.terminal.standard_streams import write
from peer.plain_text import plain


def write_text(piece: str) -> None:
    """Write a piece of text without a line of its own. Its line breaks and tabs stay; the rest of what a terminal would
    obey does not."""
    if not piece:
        return
    kept = ["\t".join(plain(cell, 1 << 20) for cell in line.split("\t")) for line in piece.split("\n")]
    write("\n".join(kept))
