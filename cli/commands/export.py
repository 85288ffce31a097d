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

from cli.options import invite_argument, read_invite
from cli.run import run_until_stopped
from cli.terminal.lines import say
from cli.views.text import several
from peer.config import WeightType
from peer.errors import CheckpointError, ConfigError, ResourceError
from peer.files import read_bounded
from peer.plain_text import plain

if TYPE_CHECKING:
    from torch import Tensor

    from swarm.run.manifest import Manifest
    from swarm.training.saved_models import SavedModel


_MARK: Final = ".barnraise-export"
"""Holds the id of the run whose model is in the folder."""
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
@click.option("--force", is_flag=True, help="Replace another model in --out.")
def export(invite: str | None, homes: tuple[Path, ...], out: Path, dtype: WeightType | None, force: bool) -> None:
    """Write config.json, model.safetensors, the tokenizer and what the original checkpoint says of texts, of a run's
    last commit, to --out: a new or empty folder, or that of an earlier export of the run.

    From --home: the newest intact checkpoint there, without network. From INVITE: the state that most members hold,
    fetched from several of them. A peer of a pipeline holds one stage of the model: give --home once for each stage.
    """
    if (invite is None) == (not homes):
        raise ConfigError("no source was named: give either INVITE or --home DIR")
    into = Target(out, dtype, force)
    if homes:
        message = _from_homes(homes, into)
    else:
        assert invite is not None
        message = _from_swarm(invite, into)
    say(message)


@dataclass(frozen=True)
class Target:
    """Where and how an export is written."""

    out: Path
    dtype: WeightType | None
    """None: that of the checkpoint which the run started from."""
    force: bool

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

    def write(self, manifest: Manifest, tokenizer: bytes, theta: Tensor) -> None:
        """Write the model `theta` (flat fp32, shape (P,)) and the run's tokenizer.json.

        Raises ResourceError if the folder cannot be written, ConfigError if fp16 cannot hold the weights.
        """
        from peer.data.tokenizer import ByteTokenizer, read_tokenizer
        from peer.model.huggingface import export_pretrained
        from swarm.run.sections import BYTES_TOKENIZER

        own = ByteTokenizer() if manifest.tokenizer == BYTES_TOKENIZER else read_tokenizer(tokenizer)
        dtype = self.dtype or manifest.export_dtype
        export_pretrained(self.out, manifest.model, theta, own, manifest.text, dtype)
        try:
            (self.out / _MARK).write_text(manifest.run_id)
        except OSError as error:
            raise ResourceError(f"cannot write to {self.out} ({error.strerror}): free some space") from error


def _from_swarm(text: str, into: Target) -> str:
    import torch  # noqa: F401  a slow import: before the network, not in the middle of it

    from swarm.client.download import download_head
    from swarm.membership.vote_shares import caution

    invite, out = read_invite(text), into.out
    into.check(invite.run_id)
    with _room_in(out) as folder:
        found = run_until_stopped(lambda: download_head(invite, folder / "state.part"))
    into.write(found.manifest, found.tokenizer, found.theta)
    for share in found.shares:
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
    into.write(found.manifest, found.tokenizer, found.theta)
    places = [(part.round, part.tree.root) for part in found.parts]
    newest = max(number for number, _ in places)
    old = [stage for stage, (number, _) in enumerate(places) if number < newest - APART_MAX]
    hint = (
        f" Behind the others: {name_stages(old)}. Add the --home of a peer with a newer checkpoint of it."
        if old
        else ""
    )
    return f"{_named(found.manifest, places)}, written to {into.out}.{hint}"


def _check_trained(homes: Sequence[Path], found: SavedModel) -> None:
    """Raise CheckpointError for a coordinator's home that does not have the last state of all stages yet."""
    from peer.identity import Identity
    from swarm.run.home import Home

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
