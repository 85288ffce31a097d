"""`peer data show`: describe a data set."""

from __future__ import annotations

from pathlib import Path

import click

from cli.commands.data.views import index_lines, run_lines
from cli.terminal.lines import say, say_json


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(folder: Path, as_json: bool) -> None:
    """Print what the data set in DIR holds, and what RUN.toml needs for it."""
    from peer.data.pages.folder import BuiltPages

    index = BuiltPages.open(folder).index
    if not as_json:
        say(*index_lines(folder, index), *run_lines(folder, index))
        return
    parts = {
        name: {
            "pages": part.pages,
            "windows": part.windows,
            "tokens": part.windows * (index.seq_len + 1),
            "documents": part.documents,
            "text_bytes": part.text_bytes,
        }
        for name, part in (("train", index.train), ("held_out", index.held_out))
    }
    facts = {
        "root": index.config.root,
        "index_bytes": index.config.index_bytes,
        "size_bytes": index.size_bytes,
        "seq_len": index.seq_len,
        "vocab_size": index.vocab_size,
        "dtype": index.dtype,
        "tokenizer": index.tokenizer,
        "tokenizers": index.tokenizers,
        "end_of_text": index.end_of_text,
        "seed": index.seed,
        "validation_share": index.validation_share,
        "license": index.license,
        "source": index.source,
    }
    say_json({**facts, **parts}, uncut=True)
