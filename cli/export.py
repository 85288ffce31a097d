"""`peer export`: the last commit of a run as a Hugging Face checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

import click

from cli.options import read_invite
from cli.run import run_until_stopped
from cli.views.table import quoted, several
from peer.errors import CheckpointError, ConfigError, ResourceError

if TYPE_CHECKING:
    from torch import Tensor

    from peer.checkpoint.checkpoint_file import LoadedCheckpoint
    from swarm.run.manifest import Manifest


APART_MAX: Final = 1  # rounds: stages commit one after the other


@click.command()
@click.argument("invite", required=False)
@click.option(
    "--home",
    "homes",
    type=click.Path(path_type=Path, file_okay=False),
    multiple=True,
    help="Export the newest checkpoint of the peer that lives here; of a pipeline give one of each stage.",
)
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the model.")
def export(invite: str | None, homes: tuple[Path, ...], out: Path) -> None:
    """Write config.json, model.safetensors (fp32) and the tokenizer of a run's last commit to --out.

    From --home: its newest intact checkpoint, without network. From INVITE: the state that most members hold, fetched
    from several of them. Where the model is cut into stages a peer holds a part of it: give --home several times.
    """
    if (invite is None) == (not homes):
        raise ConfigError("say where to export from: either INVITE or --home DIR.")
    if homes:
        message = _from_homes(homes, out)
    else:
        assert invite is not None
        message = _from_swarm(invite, out)
    click.echo(message)


def _from_swarm(text: str, out: Path) -> str:
    import torch  # noqa: F401  a slow import: before the network, not in the middle of it

    from swarm.client.download import download_head

    invite = read_invite(text)
    with _room_in(out) as folder:
        found = run_until_stopped(lambda: download_head(invite, folder / "state.part"))
    write_model(out, found.manifest, found.tokenizer, found.theta)
    places = [(head.round, head.state_hash) for head in found.heads]
    return f"{_named(found.manifest, places)}, fetched from {several(found.donors, 'peer')} and written to {out}."


@contextmanager
def _room_in(out: Path) -> Iterator[Path]:
    """A folder in `out`, which is made if it is missing, for what is gone after the block: it has the room for a model,
    as other places may not. ResourceError before anything is fetched if `out` cannot be written. What fails leaves no
    empty `out` behind."""
    made = not os.path.exists(out)  # Path.exists raises for a name that is too long
    try:
        out.mkdir(parents=True, exist_ok=True)
        folder = TemporaryDirectory(prefix=".fetched-", dir=out)
    except OSError as error:
        raise ResourceError(f"cannot write to {out} ({error.strerror}): choose another folder with --out.") from error
    try:
        with folder as path:
            yield Path(path)
    except BaseException:
        if made:
            with suppress(OSError):
                out.rmdir()
        raise


def _from_homes(homes: Sequence[Path], out: Path) -> str:
    found = newest_model(homes)
    _check_trained(homes, found)
    write_model(out, found.manifest, found.tokenizer, found.theta)
    places = [(part.round, part.tree.root) for part in found.parts]
    newest = max(number for number, _ in places)
    old = [stage for stage, (number, _) in enumerate(places) if number < newest - APART_MAX]
    hint = f" Behind the others: {_stages(old)}; add the --home of one of its peers, if that has newer." if old else ""
    return f"{_named(found.manifest, places)}, written to {out}.{hint}"


def _check_trained(homes: Sequence[Path], found: KeptModel) -> None:
    """CheckpointError where round 0 would be the coordinator's: it keeps what the run began with and nothing newer."""
    from peer.identity import Identity
    from swarm.run.home import Home

    if all(part.round > 0 for part in found.parts):
        return
    for home in homes:
        if Identity.load_or_create(Home(home).identity).peer_id == found.manifest.authority:
            raise CheckpointError(
                f"{home} is the coordinator's, which has only the weights that the run began with: give the --home of a"
                " peer that trained, or export from an INVITE."
            )


def _named(manifest: Manifest, places: list[tuple[int, bytes]]) -> str:
    """Which commit it is: round and state hash, of each stage in order."""
    states = ", ".join(root.hex()[:8] for _, root in places)
    if len(places) == 1:
        return f"Round {places[0][0]} of {manifest.run.name!r}, state {states}"
    rounds = ", ".join(str(number) for number, _ in places)
    return f"{manifest.run.name!r} put together of its {len(places)} stages at rounds {rounds}, states {states}"


@dataclass(frozen=True)
class KeptModel:
    """What peers' homes hold of a run: the newest intact checkpoint of each stage."""

    manifest: Manifest
    tokenizer: bytes
    parts: list[LoadedCheckpoint]

    @property
    def theta(self) -> Tensor:
        """The outer weights of the whole model, flat fp32, shape (P,)."""
        from peer.ipc.span import spans_of
        from peer.model.layout import join_flat

        return join_flat(self.manifest.model, [part.theta for part in self.parts], spans_of(self.manifest.cuts))


def newest_model(homes: Sequence[Path]) -> KeptModel:
    """The newest intact checkpoints of the peers of one run that live in `homes`, and its tokenizer.json. Where the
    model is cut into stages it takes a home of each. CheckpointError if something is missing."""
    from peer.events import EventLog
    from peer.identity import Identity
    from swarm.placement.stages import open_store
    from swarm.run.home import Home
    from swarm.run.manifest import open_manifest
    from swarm.run.manifest_transfer import load_run_files

    newest: dict[int, LoadedCheckpoint] = {}
    held: dict[Path, list[int]] = {}
    run_id = ""
    for home in homes:
        places, run_files = Home(home), load_run_files(home)
        if run_files is None or not places.identity.exists():
            raise CheckpointError(f"{home} is no peer's home: give the --home of `peer join`, or an INVITE.")
        manifest, tokenizer = open_manifest(run_files[0]), run_files[1]
        if run_id not in ("", manifest.run_id):
            raise CheckpointError(f"{home} belongs to another run than {homes[0]}: give homes of one run only.")
        run_id = manifest.run_id
        identity = Identity.load_or_create(places.identity)
        held[home] = []
        for stage in range(manifest.stages):
            loaded = open_store(places, manifest, stage, identity, EventLog()).load_latest()
            if loaded is not None:
                held[home].append(stage)
                if stage not in newest or loaded.round > newest[stage].round:
                    newest[stage] = loaded
    if not newest:
        named = ", ".join(map(str, homes))
        raise CheckpointError(
            f"{named} has no intact checkpoint yet: wait for a committed round, or export from an INVITE."
        )
    if len(newest) < manifest.stages:
        raise CheckpointError(_what_is_missing(held, manifest.stages))
    return KeptModel(manifest, tokenizer, [newest[stage] for stage in range(manifest.stages)])


def _what_is_missing(held: Mapping[Path, Sequence[int]], stages: int) -> str:
    """`held`: the stages of which each home has a checkpoint; not all are among them."""
    missing = sorted(set(range(stages)) - {stage for kept in held.values() for stage in kept})
    are = "is" if len(missing) == 1 else "are"
    has = "; ".join(f"{home} holds {_stages(kept) if kept else 'none'}" for home, kept in held.items())
    options = " ".join(f"--home {quoted(home)}" for home, kept in held.items() if kept)
    more = " ".join(f"--home HOME_OF_STAGE_{stage}" for stage in missing)
    return (
        f"{_stages(missing)} of {stages} {are} missing ({has}): add the home of a peer of each,"
        f" `peer export {options} {more} --out DIR`, or export from an INVITE while all stages are up."
    )


def _stages(numbers: Sequence[int]) -> str:
    """ "stage 1", "stages 0, 2"."""
    return f"stage{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"


def newest_checkpoint(home: Path) -> tuple[Manifest, bytes, LoadedCheckpoint]:
    """Of a run whose peers hold the whole model: the run, its tokenizer.json and the newest intact checkpoint of the
    peer that lives in `home`. CheckpointError if there is none."""
    found = newest_model([home])
    return found.manifest, found.tokenizer, found.parts[0]


def write_model(out: Path, manifest: Manifest, tokenizer: bytes, theta: Tensor) -> None:
    """theta: flat fp32, shape (P,); `tokenizer`: the run's tokenizer.json. ResourceError if `out` cannot be written."""
    from peer.data.tokenizer import ByteTokenizer, read_tokenizer
    from peer.model.huggingface import export_pretrained
    from swarm.run.sections import BYTES_TOKENIZER

    is_bytes = manifest.tokenizer == BYTES_TOKENIZER
    export_pretrained(out, manifest.model, theta, ByteTokenizer() if is_bytes else read_tokenizer(tokenizer))
