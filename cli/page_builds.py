"""Builds of data sets, for the commands that make one: what is planned, and how far it is."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cli.run import run_until_stopped
from cli.terminal.lines import say
from cli.terminal.work_bar import work_bar
from peer.errors import ConfigError
from peer.figures import several
from peer.files import read_bounded

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from peer.data.building.out_folder import Start
    from peer.data.building.plan import BuildPlan
    from peer.worker.building.build import BuildResult, FoundText
    from swarm.run.config import ChatsConfig, RunConfig

_STARTS: Final = {
    "continued": "Continuing the build that was begun here.",
    "over": "The build that was begun here was of other files or options: starting over.",
}
_CHAT_SETS: Final = "chats"
"""The folder of a coordinator's home that holds the data sets built of its conversations."""
_NAME_CHARS: Final = 16
_LINE_CHARS_MAX: Final = 1024
_TOKEN_CHARS_MAX: Final = 64


def planned(
    found: FoundText,
    tokenizer: str,
    *,
    chat: bool,
    chat_template: Path | None = None,
    options: Mapping[str, Any],
) -> tuple[BuildPlan, bytes]:
    """Return the plan of a data set of these files, and its tokenizer.json, empty for bytes. `tokenizer`: as the user
    names it; `chat`: whether documents are conversations; `options`: other fields of the plan. Raises ConfigError."""
    from peer.data.building.plan import FLUSH_BYTES, BuildPlan, bucket_count
    from peer.data.tokenizer import BYTES

    content, name = _tokenizer(tokenizer)
    template, bos, eos = _template(tokenizer, chat_template) if chat else ("", "", "")
    plan = BuildPlan(
        files=found.files,
        tokenizer=name,
        tokenizers="" if name == BYTES else version("tokenizers"),
        chat_template=template,
        bos=bos,
        eos=eos,
        buckets=bucket_count(found.files, name),
        flush_bytes=FLUSH_BYTES,
        **options,
    )
    _check(plan)
    return plan, content


def chat_set(chats: ChatsConfig, run: RunConfig, home: Path, tied: bool) -> Path:
    """Return the folder of the data set of the conversations that RUN.toml names. It is built in `home` if it is not
    there: one set of files and options has one folder. `tied`: see `run_until_stopped`. Raises ConfigError,
    ResourceError, CheckpointError, WorkerError."""
    from peer.worker.building.build import DataBuild, find_text, run_build
    from swarm.run.hub_models import expanded
    from swarm.run.sections import AUTO_TOKENIZER, BYTES_TOKENIZER

    source = run.tokenizer.source
    if source == AUTO_TOKENIZER and run.pretrained is not None:
        source = run.pretrained.init
    if source in (AUTO_TOKENIZER, BYTES_TOKENIZER):
        raise ConfigError(
            "[data] chats needs the tokenizer of a chat model, and this run has bytes: name one in [tokenizer] source,"
            " or a checkpoint in [model]"
        )
    path = expanded(chats.path)
    if not path.exists():
        raise ConfigError(f"[data] chats names {path}, which does not exist: correct it in RUN.toml")
    found = find_text([path])
    data, template = run.data, chats.template
    options = {"seq_len": data.seq_len, "validation_share": data.validation_share, "end_of_text": data.end_of_text}
    plan, content = planned(
        found, source, chat=True, chat_template=expanded(template) if template else None, options=options
    )
    out = home / _CHAT_SETS / plan.digest.hex()[:_NAME_CHARS]
    with BuildBars() as bars:
        result = run_until_stopped(lambda: run_build(DataBuild(plan, found.roots, content, out), bars), tied)
    if result.is_new:
        say(*_account(chats.path, result), err=True)
    return out


def _account(path: str, result: BuildResult) -> list[str]:
    """Return what was built of the conversations in `path`."""
    from peer.data.text_files import Texts

    made = result.gathered
    lines = [
        f"Built a data set of {several(made.documents, 'conversation')} in {path}: {made.counted:,} of"
        f" {made.tokens:,} tokens, those of answers, count in the loss."
    ]
    skipped = Counter(made.skipped)
    return [*lines, f"Skipped: {Texts(skipped=skipped).skipped_text()}."] if skipped else lines


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
        raise ConfigError('the tokenizer "bytes" has no chat template: name the tokenizer of a chat model')
    path = located(tokenizer, CHAT)
    folder = path if path.is_dir() else path.parent
    tokens = read_special_tokens(folder)
    source = read_template_file(named) if named else chosen_by_rule(read_templates(folder, tokens.chat_template))[0]
    if not source:
        raise ConfigError(
            f"{folder} has no chat template: name one with --chat-template FILE, or as [data] chat_template in RUN.toml"
        )
    return source, tokens.bos, tokens.eos


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
