"""The base that an export merges an adapter into: of this machine's files, or from members."""

from __future__ import annotations

from pathlib import Path

import torch
import trio

from peer.errors import CheckpointError
from peer.events import EventLog
from peer.model.frozen_weights import FrozenWeights, load_frozen
from peer.model.parameter_files import ParameterFiles
from swarm.client.session import open_client
from swarm.parts.base import bring_base, local_base
from swarm.parts.held_parts import HeldParts
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest


async def base_on_disk(manifest: Manifest, kept: Path, own: Path | None) -> FrozenWeights:
    """Return the base that is in the folder `kept` of a peer's home, in the checkpoint `own` or in the Hub's cache.
    Raises CheckpointError if some of it is not, ConfigError if `own` is another model."""
    held = await local_base(manifest, kept, own, EventLog())
    parts = 0 if manifest.base is None else len(manifest.base.cuts)
    missing = held.missing(range(parts))
    if missing:
        raise CheckpointError(
            f"{len(missing)} of {parts} parts of the base are not on this machine: name the base's checkpoint with"
            " --base, or export from an INVITE, which fetches them"
        )
    return await _loaded(manifest, held)


async def base_of_run(invite: Invite, kept: Path, own: Path | None) -> FrozenWeights:
    """As `base_on_disk`; parts that are not here are fetched into `kept` from members. Raises NetworkError, too."""
    async with open_client(invite) as client:
        manifest, members = client.training, await client.members()
        held = await bring_base(client.host, manifest, kept, own, lambda: (*members, manifest.authority))
        return await _loaded(manifest, held)


async def _loaded(manifest: Manifest, held: HeldParts) -> FrozenWeights:
    base = manifest.base
    assert base is not None
    files = await trio.to_thread.run_sync(ParameterFiles, held.folders)
    return load_frozen(files, manifest.model, base, torch.device("cpu"))
