"""`peer export`: the last commit of a run as a Hugging Face checkpoint."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import click

from cli.edge import run_until_stopped
from cli.options import home_option, read_invite
from peer.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from torch import Tensor

    from peer.checkpoint_file import Loaded
    from swarm.manifest import Manifest


@click.command()
@click.argument("invite", required=False)
@home_option("Export the newest checkpoint of the peer that lives here.")
@click.option("--out", type=click.Path(path_type=Path, file_okay=False), required=True, help="Folder for the model.")
def export(invite: str | None, home: Path | None, out: Path) -> None:
    """Write config.json, model.safetensors (fp32) and the tokenizer of a run's last commit to --out.

    From --home: its newest intact checkpoint, without network. From INVITE: the state that most members hold, fetched
    from several of them.
    """
    if (invite is None) == (home is None):
        raise ConfigError("say where to export from: either INVITE or --home DIR.")
    if home is not None:
        message = _from_home(home, out)
    else:
        assert invite is not None
        message = _from_swarm(invite, out)
    click.echo(message)


def _from_swarm(text: str, out: Path) -> str:
    import torch  # noqa: F401  a slow import: before the network, not in the middle of it

    from swarm.download import download_head

    invite = read_invite(text)
    with TemporaryDirectory(prefix="barnraise-export-") as folder:
        found = run_until_stopped(lambda: download_head(invite, Path(folder) / "state.part"))
    write_model(out, found.manifest, found.tokenizer, found.theta)
    return (
        f"Round {found.head.round} of {found.manifest.run.name!r}, state {found.head.state_hash.hex()[:8]},"
        f" fetched from {found.donors} peers and written to {out}."
    )


def _from_home(home: Path, out: Path) -> str:
    manifest, tokenizer, loaded = newest_checkpoint(home)
    write_model(out, manifest, tokenizer, loaded.theta)
    return f"Round {loaded.round} of {manifest.run.name!r}, state {loaded.tree.root.hex()[:8]}, written to {out}."


def newest_checkpoint(home: Path) -> tuple[Manifest, bytes, Loaded]:
    """The run, its tokenizer.json and the newest intact checkpoint of the peer that lives in `home`. CheckpointError if
    there is none."""
    from peer.checkpoint import CheckpointStore
    from peer.events import EventLog
    from peer.identity import Identity
    from swarm.charter import load_charter
    from swarm.home import Home
    from swarm.manifest import open_manifest

    places = Home(home)
    charter = load_charter(home)
    if charter is None or not places.identity.exists():
        raise CheckpointError(f"{home} is no peer's home: give the --home of `peer join`, or an INVITE.")
    signed, tokenizer = charter
    manifest = open_manifest(signed)
    identity = Identity.load_or_create(places.identity)
    loaded = CheckpointStore(places.checkpoints, identity, manifest.run_id, EventLog()).load_latest()
    if loaded is None:
        raise CheckpointError(
            f"{home} has no intact checkpoint yet: wait for a committed round, or export from an INVITE."
        )
    return manifest, tokenizer, loaded


def write_model(out: Path, manifest: Manifest, tokenizer: bytes, theta: Tensor) -> None:
    """theta: flat fp32, shape (P,); `tokenizer`: the run's tokenizer.json. ResourceError if `out` cannot be written."""
    from peer.hf import export_pretrained
    from peer.tokenizer import load_tokenizer
    from swarm.manifest import BYTES_TOKENIZER

    if manifest.tokenizer == BYTES_TOKENIZER:
        export_pretrained(out, manifest.model, theta, load_tokenizer(BYTES_TOKENIZER))
        return
    with TemporaryDirectory() as folder:
        file = Path(folder) / "tokenizer.json"
        file.write_bytes(tokenizer)
        export_pretrained(out, manifest.model, theta, load_tokenizer(str(file)))
