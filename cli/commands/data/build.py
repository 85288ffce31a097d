"""`peer data build`: make a data set of pages from files of text."""

from __future__ import annotations

from pathlib import Path

import click

from cli.commands.data.views import result_lines
from cli.options import Number
from cli.page_builds import BuildBars, planned
from cli.run import run_until_stopped
from cli.terminal.lines import say
from peer.errors import ConfigError


@click.command()
@click.argument("files", nargs=-1, required=True)
@click.option(
    "--tokenizer", required=True, help='"bytes", a tokenizer.json, its folder, or a model ORG/NAME of the Hub.'
)
@click.option("--seq-len", type=click.IntRange(1, 1 << 20), required=True, help="Tokens that a sample predicts.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the data set.")
@click.option("--text-field", default="", help="The field of JSON objects, or column, with the text.  [default: text]")
@click.option(
    "--chat",
    is_flag=True,
    help="The field holds messages, a list of objects with role and content: only answers count in the loss.",
)
@click.option(
    "--chat-template",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="With --chat: the template of conversations.  [default: that beside the tokenizer]",
)
@click.option("--end-of-text", help="The special token after each document.  [default: the one it is known by]")
@click.option("--seed", type=click.IntRange(0, (1 << 53) - 1), default=0, show_default=True, help="Of the order.")
@click.option(
    "--held-out", type=Number(0, 0.5), default=0.05, show_default=True, help="The share of documents to hold out."
)
@click.option("--license", "license_", default="", help="The license of the text, for those who fetch it.")
@click.option("--source", default="", help="Where the text is from, for those who fetch it.")
@click.option("--strict", is_flag=True, help="End at the first file that cannot be read.")
def build(
    files: tuple[str, ...],
    tokenizer: str,
    seq_len: int,
    out: Path,
    text_field: str,
    chat: bool,
    chat_template: Path | None,
    end_of_text: str | None,
    seed: int,
    held_out: float,
    license_: str,
    source: str,
    strict: bool,
) -> None:
    """Make a data set of pages from FILES: files and folders of text (.txt, .md, ...), JSON lines and .parquet, also
    with .gz or .zst, or a data set ORG/NAME of the Hugging Face Hub.

    The order of documents depends on their texts and the seed alone: the same texts make the same data set from other
    files, too. A build that was stopped continues with the same command.
    """
    from peer.worker.building.build import DataBuild, find_text, run_build

    if chat_template is not None and not chat:
        raise ConfigError("--chat-template is of conversations: give --chat, too, or leave it out")
    found = find_text([_root(file) for file in files])
    options = {
        "seq_len": seq_len,
        "text_field": text_field,
        "end_of_text": end_of_text,
        "seed": seed,
        "validation_share": held_out,
        "license": license_,
        "source": source,
    }
    plan, content = planned(found, tokenizer, chat=chat, chat_template=chat_template, options=options)
    work = DataBuild(plan, found.roots, content, out, strict)
    with BuildBars() as bars:
        result = run_until_stopped(lambda: run_build(work, bars))
    if not result.is_new:
        say(f"{out} holds this data set already: {result.index.config.root}.")
        return
    say(*result_lines(out, result.index, result.gathered, found.skipped))


def _root(named: str) -> Path:
    """Return the file or folder of a name: a path, or the data set with that id, fetched from the Hub."""
    from swarm.run.hub_models import expanded, is_hub_id

    path = expanded(named)
    if path.exists() or not is_hub_id(named):
        return path
    from cli.commands.data.hub_texts import fetched

    return fetched(named)
