"""`peer export`: write the last commit as a Hugging Face checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import click
import msgspec

from cli.combinations import check_one_source, refuse_without
from cli.options import invite_argument, read_invite
from cli.progress.event_tail import EventTail
from cli.run import run_until_stopped
from cli.terminal.lines import say
from peer.bounds import Loss
from peer.catalogue.machine import CorpusRead
from peer.catalogue.rounds import ValEvaluated
from peer.config import PagesConfig, WeightType
from peer.corpus_facts import CorpusFacts
from peer.decoding import MALFORMED
from peer.errors import CheckpointError, ConfigError, ResourceError
from peer.figures import several
from peer.files import read_bounded
from peer.plain_text import plain
from swarm.run.home import Home

if TYPE_CHECKING:
    from torch import Tensor

    from peer.data.pages.index import PageIndex
    from peer.model.frozen_weights import FrozenWeights
    from swarm.client.download import Download
    from swarm.client.model_card import TrainedFacts
    from swarm.run.manifest import Manifest
    from swarm.training.saved_models import SavedModel


_MARK: Final = ".barnraise-export"
"""Holds the id of the run whose model is in the folder."""
_CARD_HEAD_BYTES: Final = 4096
APART_MAX: Final = 1  # rounds; stages commit one after the other


@click.command()
@invite_argument(required=False)
@click.option(
    "--home",
    "homes",
    type=click.Path(path_type=Path, file_okay=False),
    multiple=True,
    help="Export the newest checkpoint of the peer with this home. Of a pipeline give one home of each stage.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the model.")
@click.option(
    "--dtype",
    type=click.Choice(["fp32", "bf16", "fp16"]),
    help="The type of the weights (default: that of the checkpoint which the run started from, else fp32).",
)
@click.option(
    "--merge", is_flag=True, help="Of a run that tunes an adapter: write the whole model, its base with the adapter."
)
@click.option(
    "--base",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    help="With --merge: the folder of the base's checkpoint.  [default: a peer's --home, else fetch it]",
)
@click.option("--force", is_flag=True, help="Replace another model in --out.")
@click.option("--push", metavar="ORG/NAME", help="Upload the export to this model of the Hugging Face Hub.")
@click.option("--public", is_flag=True, help="Make a model that --push creates readable by all users.")
def export(
    invite: str | None,
    homes: tuple[Path, ...],
    out: Path,
    dtype: WeightType | None,
    merge: bool,
    base: Path | None,
    force: bool,
    push: str | None,
    public: bool,
) -> None:
    """Write config.json, model.safetensors, the tokenizer and what the original checkpoint says of texts, of a run's
    last commit, to --out: a new or empty folder, or that of an earlier export of the run.

    From --home: the newest intact checkpoint there, without network. From INVITE: the state that most members hold,
    fetched from several of them. A peer of a pipeline holds one stage of the model: give --home once for each stage.

    Of a run that tunes a checkpoint it writes the adapter as PEFT's two files; with --merge the whole model.
    """
    check_one_source("source", "invite", "homes")
    if public and push is None:
        raise ConfigError("--public says how --push makes a model: add --push ORG/NAME, or leave --public out")
    if push is not None:
        from swarm.client.hub_upload import check_push

        check_push(push)
    refuse_without("--merge", merge, "base")
    into = Target(out, dtype, force, push, merge, base)
    if homes:
        message = _from_homes(homes, into)
    else:
        assert invite is not None
        message = _from_swarm(invite, into)
    say(message)
    if push is not None:
        from swarm.client.hub_upload import push as upload

        say(f"Pushed to {plain(upload(out, push, not public, message))}.")


@dataclass(frozen=True)
class Target:
    """Where and how an export is written."""

    out: Path
    dtype: WeightType | None
    """None: that of the checkpoint which the run started from."""
    force: bool
    name: str | None = None
    """The id on the Hub, if it is pushed."""
    merge: bool = False
    """Whether an adapter is written as the whole model that it makes of its base."""
    base: Path | None = None
    """The folder of that base; None to look for it."""

    def check(self, run_id: str) -> None:
        """Raise ConfigError if the folder holds what an export of that run would spoil."""
        mark = self.out / _MARK
        try:
            if self.force or not os.path.isdir(self.out) or not os.listdir(self.out):
                return
            same = mark.is_file() and read_bounded(mark, 64) == run_id.encode()
        except OSError as error:
            raise ResourceError(f"{self.out} cannot be read ({error.strerror}): choose another with --out") from error
        if not same:
            raise ConfigError(
                f"{self.out} holds another model or other files: choose another folder with --out, or replace the model"
                " in it with --force"
            )

    def check_form(self, manifest: Manifest) -> None:
        """Raise ConfigError for a form that the run's model does not have."""
        if self.merge and manifest.base is None:
            raise ConfigError("this run trains a whole model, so there is no adapter to merge: leave --merge out")
        if self.dtype is not None and manifest.base is not None and not self.merge:
            raise ConfigError("an adapter is written in fp32: leave --dtype out, or add --merge for the whole model")

    def write(
        self,
        manifest: Manifest,
        tokenizer: bytes,
        theta: Tensor,
        facts: TrainedFacts,
        base: FrozenWeights | None = None,
    ) -> None:
        """Write the model `theta` (flat fp32, shape (P,)), the run's tokenizer.json and the model card. With `base` an
        adapter is merged into it.

        Raises ResourceError if the folder cannot be written, ConfigError if fp16 cannot hold the weights.
        """
        from peer.data.tokenizer import ByteTokenizer, read_tokenizer
        from peer.footprint.parameters import base_of
        from peer.model.adapter_files import WEIGHTS, export_adapter, merged, remove_adapter
        from peer.model.huggingface import WEIGHT_TYPES, export_pretrained, export_weights, remove_weights
        from peer.model.text.rules import write_text_rules
        from swarm.client.model_card import CARD, model_card
        from swarm.run.sections import BYTES_TOKENIZER

        own = ByteTokenizer() if manifest.tokenizer == BYTES_TOKENIZER else read_tokenizer(tokenizer)
        dtype = self.dtype or manifest.export_dtype
        model, text = manifest.model, manifest.text
        if manifest.base is None:
            export_pretrained(self.out, model, theta, own, text, dtype)
        elif base is None:
            export_adapter(self.out, model, theta, manifest.base_model)
        else:
            remove_adapter(self.out)
            export_weights(self.out, base_of(model), merged(model, theta, base, WEIGHT_TYPES[dtype]), own, text, dtype)
        try:
            if manifest.base is not None and base is None:
                remove_weights(self.out, but=WEIGHTS)
                own.save(self.out)
                write_text_rules(self.out, text)
            (self.out / _MARK).write_text(manifest.run_id)
            card = self.out / CARD
            if not card.exists() or _is_written(card):
                card.write_text(model_card(manifest, facts, self.name or ".", self.merge), encoding="utf-8")
        except OSError as error:
            raise ResourceError(f"cannot write to {self.out} ({error.strerror}): free some space") from error


def _from_swarm(text: str, into: Target) -> str:
    import torch  # noqa: F401  a slow import: before the network, not in the middle of it

    from swarm.client.download import download_head
    from swarm.membership.vote_shares import alarms, caution

    invite, out = read_invite(text), into.out
    into.check(invite.run_id)
    with _room_in(out) as folder:
        found = run_until_stopped(lambda: download_head(invite, folder / "state.part"))
        into.check_form(found.manifest)
        base = None
        if into.merge:
            from swarm.client.merged_base import base_of_run

            base = run_until_stopped(lambda: base_of_run(invite, folder / "base", into.base))
        into.write(found.manifest, found.tokenizer, found.theta, facts_of(found), base)
    for share in alarms(found.shares):
        say(f"Warning: {plain(caution(share))}.", err=True)
    places = [(head.round, head.state_hash) for head in found.heads]
    return f"{_named(found.manifest, places)}, fetched from {several(found.donors, 'peer')} and written to {out}."


@contextmanager
def _room_in(out: Path) -> Iterator[Path]:
    """Yield a temporary folder inside `out`, whose disk must have room for the model anyway.

    `out` is made if it is missing, and removed again if the block fails. Raises ResourceError if `out` cannot be
    written, before anything is fetched.
    """
    made = not os.path.exists(out)  # Path.exists raises for a name that is too long
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix=".fetched-", dir=out)
    except OSError as error:
        raise ResourceError(f"cannot write to {out} ({error.strerror}): choose another folder with --out") from error
    try:
        with folder as path:
            yield Path(path)
    except BaseException:
        if made:
            with suppress(OSError):
                out.rmdir()
        raise


def _from_homes(homes: Sequence[Path], into: Target) -> str:
    from swarm.training.saved_models import name_stages, newest_model

    found = newest_model(homes)
    _check_trained(homes, found)
    into.check(found.manifest.run_id)
    into.check_form(found.manifest)
    base = _base_of(homes[0], found.manifest, into.base) if into.merge else None
    into.write(found.manifest, found.tokenizer, found.theta, _facts_at(homes, found), base)
    places = [(part.round, part.tree.root) for part in found.parts]
    newest = max(number for number, _ in places)
    old = [stage for stage, (number, _) in enumerate(places) if number < newest - APART_MAX]
    hint = (
        f" Behind the others: {name_stages(old)}. Add the --home of a peer with a newer checkpoint of it."
        if old
        else ""
    )
    return f"{_named(found.manifest, places)}, written to {into.out}.{hint}"


def _base_of(home: Path, manifest: Manifest, own: Path | None) -> FrozenWeights:
    """Return the base that a peer with that home has, or a coordinator."""
    from swarm.client.merged_base import base_on_disk

    source = Home(home).base_source
    if own is None and source.exists() and os.path.isdir(noted := os.fsdecode(source.read_bytes())):
        own = Path(noted)
    return run_until_stopped(lambda: base_on_disk(manifest, Home(home).base, own))


def facts_of(found: Download) -> TrainedFacts:
    """Return what a download says of its training."""
    from swarm.client.model_card import TrainedFacts

    return TrainedFacts(
        rounds=tuple(head.round for head in found.heads),
        states=tuple(head.state_hash.hex() for head in found.heads),
        tokens=min(head.tokens for head in found.heads),
        losses=found.losses,
    )


def _facts_at(homes: Sequence[Path], found: SavedModel) -> TrainedFacts:
    """Return what the homes say of the training: their checkpoints' heads, and what their peers have written down."""
    from swarm.client.model_card import TrainedFacts

    rounds = tuple(part.round for part in found.parts)
    losses, corpora = [], []
    for home in homes:
        loss, corpus = _noted(Home(home).events, max(rounds))
        losses += [] if loss is None else [loss]
        corpora += [] if corpus is None else [corpus]
    return TrainedFacts(
        rounds=rounds,
        states=tuple(part.tree.root.hex() for part in found.parts),
        tokens=min(_tokens(part.head) for part in found.parts),
        losses=tuple(losses),
        corpora=tuple(corpora),
        data_set=_data_set(homes, found.manifest.data.pages),
    )


def _data_set(homes: Sequence[Path], wanted: PagesConfig | None) -> PageIndex | None:
    """Return the index of the run's data set, from a home that has it; None where none does."""
    from peer.data.pages.folder import load_index

    for home in homes if wanted is not None else ():
        with suppress(ConfigError):
            return load_index(Home(home).page_index, wanted)
    return None


class _TrainedHead(msgspec.Struct):
    """A head, as far as the card tells it."""

    tokens: int = 0


def _tokens(head: bytes) -> int:
    try:
        return msgspec.msgpack.decode(head, type=_TrainedHead).tokens
    except MALFORMED:
        return 0


def _is_written(card: Path) -> bool:
    """Whether an export has written the card, and no person since."""
    from swarm.client.model_card import WRITTEN_MARK

    with card.open("rb") as file:
        return WRITTEN_MARK.encode() in file.read(_CARD_HEAD_BYTES)


def _noted(events: Path, number: int) -> tuple[float | None, CorpusFacts | None]:
    """Return the held-out loss after round `number` and what was read of the text, as a peer's events say; None for
    what they do not."""
    loss: float | None = None
    corpus: CorpusFacts | None = None
    tail = EventTail(events)
    for _, event in tail.heard():
        with suppress(msgspec.ValidationError):
            match event:
                case CorpusRead():
                    corpus = CorpusFacts.of(event)
                case ValEvaluated(round=at, loss=measured) if at == number:
                    loss = msgspec.convert(measured, Loss | None)
    tail.close()
    return loss, corpus


def _check_trained(homes: Sequence[Path], found: SavedModel) -> None:
    """Raise CheckpointError for a coordinator's home that does not have the last state of all stages yet."""
    from peer.identity import Identity

    if all(part.round > 0 for part in found.parts):
        return
    for home in homes:
        if Identity.load_or_create(Home(home).identity).peer_id == found.manifest.authority:
            gossip = not found.manifest.outer.has_common_state
            when = "of a gossip run" if gossip else "before the run is complete"
            raise CheckpointError(
                f"{home} is the coordinator's home, and holds no trained weights {when}: give the --home of a peer that"
                " trained, or export from an INVITE"
            )


def _named(manifest: Manifest, places: list[tuple[int, bytes]]) -> str:
    """Name the commit: round and state hash of each stage in order."""
    name, states = plain(manifest.run.name), ", ".join(root.hex()[:8] for _, root in places)
    if len(places) == 1:
        return f"Round {places[0][0]} of {name!r}, state {states}"
    rounds = ", ".join(str(number) for number, _ in places)
    return f"{name!r} put together from its {len(places)} stages at rounds {rounds}, states {states}"
