"""A data set in lines of text."""

from __future__ import annotations

import shlex
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Final

from peer.figures import quoted, several, size_text

if TYPE_CHECKING:
    from peer.data.building.gathering import GatheredText
    from peer.data.pages.index import PageIndex, PagePart


_MARKED: Final = "of conversations, of which answers alone count in the loss, by the template"
_HOW: Final = {
    "tags": "the template's tags",
    "compared": "comparing the text with and without each answer",
    "last answer": "their last answer alone, as the template changes what is before",
}


def index_lines(folder: Path, index: PageIndex) -> list[str]:
    """Return what a data set holds."""
    ended = "an empty line" if not index.end_of_text else repr(index.end_of_text)
    tokenizer = index.tokenizer if not index.tokenizers else f"{index.tokenizer}, by tokenizers {index.tokenizers}"
    lines = [
        f"root       {index.config.root}",
        f"train      {_part(index.train, index.seq_len)}",
        f"held out   {_part(index.held_out, index.seq_len)} (share {index.validation_share:g}, seed {index.seed})",
        f"tokenizer  {tokenizer}",
        f"tokens     {index.vocab_size:,} ids in {index.dtype}, {index.seq_len + 1:,} in a window",
        f"           {ended} after each document",
        *([f"           {_MARKED} {index.chat_template[:16]}"] if index.masked else []),
        f"on disk    {size_text(index.size_bytes)} in {quoted(folder)}",
        f"license    {index.license or '-'}",
        f"source     {index.source or '-'}",
    ]
    return lines


def run_lines(folder: Path, index: PageIndex) -> list[str]:
    """Return what RUN.toml needs for a data set."""
    from peer.data.pages.folder import TOKENIZER
    from peer.data.tokenizer import BYTES

    source = BYTES if index.tokenizer == BYTES else str(folder.absolute() / TOKENIZER)
    return [
        "For a run, write in RUN.toml:",
        "  [data]",
        '  source = "pages"',
        f"  seq_len = {index.seq_len}",
        "  [tokenizer]",
        f'  source = "{source}"',
        "  [model]",
        f"  vocab_size = {index.vocab_size}  # or more",
        f"and run: peer coordinate RUN.toml --data {shlex.quote(str(folder))}",
    ]


def result_lines(folder: Path, index: PageIndex, found: GatheredText, skipped: Counter[str]) -> list[str]:
    """Return what a build has made, and what it left out."""
    from peer.data.text_files import Texts

    texts = Texts(skipped=skipped + Counter(found.skipped))
    lines = [*index_lines(folder, index), f"skipped    {texts.skipped_text()}"]
    if found.marked:
        how = ", ".join(f"{count:,} by {_HOW[how]}" for how, count in sorted(found.marked.items()) if how in _HOW)
        lines.append(f"answers    {found.counted:,} of {found.tokens:,} tokens count in the loss; conversations: {how}")
    if found.replaced:
        lines.append(f"replaced   invalid characters in {several(found.replaced, 'file')}, by U+FFFD")
    if found.unreadable_files:
        more = found.unreadable_files - len(found.unreadable)
        lines += [f"not read   {name}" for name in found.unreadable]
        lines += [f"not read   {several(more, 'other file')}"] if more else []
    return [*lines, f"`peer data show {shlex.quote(str(folder))}` says what RUN.toml needs for it."]


def _part(part: PagePart, seq_len: int) -> str:
    return (
        f"{several(part.pages, 'page')}, {part.windows:,} windows, {part.windows * (seq_len + 1):,} tokens,"
        f" {several(part.documents, 'document')} of {size_text(part.text_bytes)}"
    )
