"""Text that appears piece by piece, as an answer does while it is generated."""

from __future__ import annotations

import sys

from cli.terminal.standard_streams import write
from peer.plain_text import plain


def write_text(piece: str) -> None:
    """Write a piece of text without a line of its own. Its line breaks and tabs stay; the rest of what a terminal would
    obey does not."""
    if not piece:
        return
    kept = ["\t".join(plain(cell, 1 << 20) for cell in line.split("\t")) for line in piece.split("\n")]
    write("\n".join(kept))


class AnswerText:
    """One answer on standard output: on a terminal the model's thinking, dimmed, and the answer below it; in a pipe the
    answer alone."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._is_thinking = False

    def add(self, thought: str, text: str) -> None:
        """Write a piece of the thinking, and then one of the answer; "" for none."""
        if thought and self._is_terminal:
            self._is_thinking = True
            self._write_dimmed(thought)
        if text and self._is_thinking:
            self._is_thinking = False
            write_text("\n\n")
        write_text(text)

    def _write_dimmed(self, piece: str) -> None:
        from rich.text import Text  # here: it is slow to load, and few models think

        from cli.terminal.screen import screen

        screen(wraps=False).print(Text(piece, style="dim"), end="")
