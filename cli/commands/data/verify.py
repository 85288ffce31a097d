"""`peer data verify`: check every page of a data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.run import stopping_by_signal
from cli.terminal.lines import say
from cli.terminal.work_bar import work_bar
from peer.errors import CheckpointError
from peer.figures import several

if TYPE_CHECKING:
    from peer.data.pages.folder import BuiltPages


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
def verify(folder: Path) -> None:
    """Read all pages of the data set in DIR and compare each with its hash. The exit code is 6 if one is damaged."""
    from peer.data.pages.folder import INDEX, BuiltPages, load_index

    pages = BuiltPages(folder, load_index(folder / INDEX))
    with stopping_by_signal():
        faults = _of_files(pages)
        if not faults:
            faults = _of_pages(pages)
    if faults:
        raise CheckpointError(f"{folder} has {faults}: copy the folder again, or build it again")
    say(f"{folder} is verified: {several(pages.index.pages, 'page')} of the data set {pages.index.config.root}.")


def _of_files(pages: BuiltPages) -> str:
    """Say which files are missing or of another size, and return their number."""
    from blake3 import blake3

    from peer.data.pages.folder import TOKENIZER
    from peer.data.tokenizer import BYTES
    from peer.data.tokenizer_rules import TOKENIZER_BYTES_MAX
    from peer.files import read_bounded

    count = 0
    for path, size_bytes in pages.files():
        found = path.stat().st_size if path.is_file() else -1
        if found != size_bytes:
            count += 1
            say(f"{path} is missing" if found < 0 else f"{path} has {found} bytes instead of {size_bytes}")
    if pages.index.tokenizer != BYTES:
        path = pages.folder / TOKENIZER
        try:
            same = blake3(read_bounded(path, TOKENIZER_BYTES_MAX)).hexdigest() == pages.index.tokenizer
        except OSError:
            same = False
        if not same:
            count += 1
            say(f"{path} is missing, or not the tokenizer of the data set")
    return several(count, "damaged file") if count else ""


def _of_pages(pages: BuiltPages) -> str:
    """Say which pages are damaged, and return their number."""
    done = count = 0
    with work_bar("Verifying") as draw:

        def looked_at(size_bytes: int) -> None:
            nonlocal done
            done += size_bytes
            draw(done, pages.index.size_bytes)

        for page, reason in pages.damaged(looked_at):
            count += 1
            say(f"{pages.find(page).path}: page {page} {reason}")
    return several(count, "damaged page") if count else ""
