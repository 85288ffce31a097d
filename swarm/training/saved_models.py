"""The models in peers' homes: the newest intact checkpoint of each stage, and the tokenizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor

from peer.checkpoint.checkpoint_file import LoadedCheckpoint
from peer.errors import CheckpointError
from peer.events import EventLog
from peer.identity import Identity
from peer.ipc.span import spans_of
from peer.model.layout import join_flat
from swarm.placement.stages import open_store
from swarm.run.home import Home
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.manifest_transfer import load_run_files


@dataclass(frozen=True)
class SavedModel:
    """A run's model as it was read from peers' homes."""

    manifest: Manifest
    tokenizer: bytes
    """The run's tokenizer.json, empty for bytes."""
    parts: list[LoadedCheckpoint]
    """The newest intact checkpoint of each stage."""

    @property
    def theta(self) -> Tensor:
        """The outer weights of the whole model, flat fp32, shape (P,)."""
        return join_flat(self.manifest.model, [part.theta for part in self.parts], spans_of(self.manifest.cuts))


def newest_model(homes: Sequence[Path]) -> SavedModel:
    """Load the newest intact checkpoints that the peers of one run have in `homes`. Where the model is cut into stages
    it takes a home of each. Raises CheckpointError if something is missing."""
    newest: dict[int, LoadedCheckpoint] = {}
    held: dict[Path, list[int]] = {}
    run_id = ""
    for home in homes:
        paths, run_files = Home(home), load_run_files(home)
        if run_files is None or not paths.identity.exists():
            raise CheckpointError(f"{home} is no peer's home: give the --home of `peer join`, or an INVITE")
        manifest, tokenizer = open_manifest(run_files[0]), run_files[1]
        if run_id not in ("", manifest.run_id):
            raise CheckpointError(f"{home} belongs to another run than {homes[0]}: give homes of one run only")
        run_id = manifest.run_id
        identity = Identity.load_or_create(paths.identity)
        held[home] = []
        for stage in range(manifest.stages):
            loaded = open_store(paths, manifest, stage, identity, EventLog()).load_latest()
            if loaded is not None:
                held[home].append(stage)
                if stage not in newest or loaded.round > newest[stage].round:
                    newest[stage] = loaded
    if not newest:
        named = ", ".join(map(str, homes))
        raise CheckpointError(
            f"{named} has no intact checkpoint yet: wait for a committed round, or export from an INVITE"
        )
    if len(newest) < manifest.stages:
        raise CheckpointError(_what_is_missing(held, manifest.stages))
    return SavedModel(manifest, tokenizer, [newest[stage] for stage in range(manifest.stages)])


def _what_is_missing(held: Mapping[Path, Sequence[int]], stages: int) -> str:
    """`held`: the stages of which each home has a checkpoint; not all are among them."""
    missing = sorted(set(range(stages)) - {stage for found in held.values() for stage in found})
    are = "is" if len(missing) == 1 else "are"
    has = "; ".join(f"{home} holds {name_stages(found) if found else 'none'}" for home, found in held.items())
    options = " ".join(Home(home).option for home, found in held.items() if found)
    more = " ".join(f"--home HOME_OF_STAGE_{stage}" for stage in missing)
    return (
        f"{name_stages(missing)} of {stages} {are} missing ({has}): add the home of a peer of each,"
        f" `peer export {options} {more} --out DIR`, or export from an INVITE while all stages are up"
    )


def name_stages(numbers: Sequence[int]) -> str:
    """Return "stage 1" or "stages 0, 2"."""
    return f"stage{'' if len(numbers) == 1 else 's'} {', '.join(map(str, numbers))}"
