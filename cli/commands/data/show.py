"""`peer data show`: describe a data set."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from cli.commands.data.views import index_lines, run_lines
from cli.terminal.lines import say, say_json
from peer.errors import ConfigError

if TYPE_CHECKING:
    from peer.data.pages.folder import BuiltPages


@click.command()
@click.argument("folder", metavar="DIR", type=click.Path(path_type=Path))
@click.option("--samples", metavar="A-B,...", help="Print the hash of these samples; peers tell it in samples_hashed.")
@click.option("--run-seed", type=click.IntRange(0), default=0, show_default=True, help="With --samples: [run] seed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def show(folder: Path, samples: str | None, run_seed: int, as_json: bool) -> None:
    """Print what the data set in DIR holds, and what RUN.toml needs for it."""
    from peer.data.pages.folder import BuiltPages

    built = BuiltPages.open(folder)
    index = built.index
    if samples is not None:
        _show_samples(built, samples, run_seed)
        return
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
        "masked": index.masked,
        "chat_template": index.chat_template,
        "seed": index.seed,
        "validation_share": index.validation_share,
        "license": index.license,
        "source": index.source,
    }
    say_json({**facts, **parts}, uncut=True)


def _show_samples(built: BuiltPages, samples: str, seed: int) -> None:
    from peer.data.first_samples import hash_of, parse_ranges
    from peer.data.pages.corpus import PagedCorpus

    try:
        numbers = parse_ranges(samples)
    except ValueError as error:
        raise ConfigError(
            f"--samples {samples} names no samples: give ranges of numbers such as 0-80,240-320, the ends left out"
        ) from error
    say(hash_of(PagedCorpus(built.index, built.index.config.root, [built]), numbers, seed), uncut=True)
