"""`peer data build`: make a data set of pages from files of text."""

from __future__ import annotations

from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from cli.commands.data.views import result_lines
from cli.options import Number
from cli.run import run_until_stopped
from cli.terminal.lines import say
from cli.terminal.work_bar import work_bar
from peer.errors import ConfigError
from peer.files import read_bounded

if TYPE_CHECKING:
    from collections.abc import Callable

    from peer.data.building.out_folder import Start
    from peer.data.building.plan import BuildPlan

_STARTS: Final = {
    "continued": "Continuing the build that was begun here.",
    "over": "The build that was begun here was of other files or options: starting over.",
}
_LINE_CHARS_MAX: Final = 1024
_TOKEN_CHARS_MAX: Final = 64


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
    from peer.data.building.plan import FLUSH_BYTES, BuildPlan, bucket_count
    from peer.data.tokenizer import BYTES
    from peer.worker.building.build import DataBuild, find_text, run_build

    if chat_template is not None and not chat:
        raise ConfigError("--chat-template is of conversations: give --chat, too, or leave it out")
    content, name = _tokenizer(tokenizer)
    template, bos, eos = _template(tokenizer, chat_template) if chat else ("", "", "")
    found = find_text([_root(file) for file in files])
    plan = BuildPlan(
        files=found.files,
        seq_len=seq_len,
        tokenizer=name,
        tokenizers="" if name == BYTES else version("tokenizers"),
        text_field=text_field,
        end_of_text=end_of_text,
        seed=seed,
        validation_share=held_out,
        license=license_,
        source=source,
        chat_template=template,
        bos=bos,
        eos=eos,
        buckets=bucket_count(found.files, name),
        flush_bytes=FLUSH_BYTES,
    )
    _check(plan)
    work = DataBuild(plan, found.roots, content, out, strict)
    with BuildBars() as bars:
        result = run_until_stopped(lambda: run_build(work, bars))
    if not result.is_new:
        say(f"{out} holds this data set already: {result.index.config.root}.")
        return
    say(*result_lines(out, result.index, result.gathered, found.skipped))


class BuildBars(ExitStack):
    """The bars of both passes, one after the other: a `BuildWatch`."""

    def __init__(self) -> None:
        super().__init__()
        self._label = ""
        self._draw: Callable[[int, int], None] = lambda done, of: None

    def began(self, start: Start) -> None:
        """See `BuildWatch`."""
        if start in _STARTS:
            say(_STARTS[start], err=True)

    def reading(self, done_bytes: int, of_bytes: int) -> None:
        """See `BuildWatch`."""
        self._show("Reading", done_bytes, of_bytes)

    def packing(self, done_bytes: int, of_bytes: int) -> None:
        """See `BuildWatch`."""
        self._show("Packing", done_bytes, of_bytes)

    def _show(self, label: str, done_bytes: int, of_bytes: int) -> None:
        if label != self._label:
            self.close()
            self._label, self._draw = label, self.enter_context(work_bar(label))
        self._draw(done_bytes, of_bytes)


def _tokenizer(named: str) -> tuple[bytes, str]:
    """Return the tokenizer.json (empty for bytes), and its name in an index. It is not parsed in this process."""
    from blake3 import blake3

    from peer.data.tokenizer import BYTES
    from peer.data.tokenizer_rules import TOKENIZER_BYTES_MAX
    from swarm.run.hub_models import located
    from swarm.run.tokenizer import FILE

    if named == BYTES:
        return b"", BYTES
    path = located(named, FILE)
    path = path / FILE if path.is_dir() else path
    try:
        content = read_bounded(path, TOKENIZER_BYTES_MAX)
    except OSError as error:
        raise ConfigError(
            f'{path} cannot be read ({error.strerror}): give --tokenizer "bytes" or the path of a tokenizer.json'
        ) from error
    return content, blake3(content).hexdigest()


def _template(tokenizer: str, named: Path | None) -> tuple[str, str, str]:
    """Return the chat template, and the tokens that it knows as bos and eos. It is run in the worker alone."""
    from peer.data.tokenizer import BYTES
    from peer.model.text.chat_templates import chosen_by_rule, read_template_file, read_templates
    from peer.model.text.special_tokens import read_special_tokens
    from swarm.run.hub_models import CHAT, located

    if tokenizer == BYTES:
        raise ConfigError('with --chat the tokenizer "bytes" has no chat template: name the tokenizer of a chat model')
    path = located(tokenizer, CHAT)
    folder = path if path.is_dir() else path.parent
    tokens = read_special_tokens(folder)
    source = read_template_file(named) if named else chosen_by_rule(read_templates(folder, tokens.chat_template))[0]
    if not source:
        raise ConfigError(f"{folder} has no chat template: name one with --chat-template FILE")
    return source, tokens.bos, tokens.eos


def _root(named: str) -> Path:
    """Return the file or folder of a name: a path, or the data set with that id, fetched from the Hub."""
    from swarm.run.hub_models import expanded, is_hub_id

    path = expanded(named)
    if path.exists() or not is_hub_id(named):
        return path
    from cli.commands.data.hub_texts import fetched

    return fetched(named)


def _check(plan: BuildPlan) -> None:
    """Raise ConfigError for an option that no index takes."""
    for option, text, most in (
        ("--license", plan.license, _LINE_CHARS_MAX),
        ("--source", plan.source, _LINE_CHARS_MAX),
        ("--end-of-text", plan.end_of_text or "", _TOKEN_CHARS_MAX),
    ):
        if len(text) > most or not text.isprintable():
            raise ConfigError(
                f"{option} {text[:40]!a} is longer than {most} characters or has control characters: shorten it to one"
                " line"
            )
    try:
        plan.index(1 << 17, plan.end_of_text or "")
    except ValueError as error:
        raise ConfigError(str(error)) from error
