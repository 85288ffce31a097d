"""The frozen base of a run with an adapter, at the coordinator: its hashes, and its parts for members."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import torch
import trio

from peer.catalogue.groups import BaseMissing
from peer.config import ModelConfig
from peer.errors import CheckpointError
from peer.events import EventLog
from peer.files import read_bounded, write_atomically
from peer.footprint.parameters import EMBEDDING, HEAD
from peer.footprint.stored import stored_bytes
from peer.model.hub_config import CONFIG_BYTES_MAX, chosen_quantization, read_base_config, saved_quantization
from peer.model.parameter_files import ParameterFiles
from peer.model.weight_files import weight_files
from peer.net.host import Host
from swarm.parts.checkpoint import check_names, own_dtype
from swarm.parts.hashing import hash_parts
from swarm.parts.held_parts import HeldParts
from swarm.parts.weights import BaseWeights, EvenWeights
from swarm.run.config import Pretrained
from swarm.run.home import Home
from swarm.run.manifest import FrozenBase, Manifest

_CONFIG: Final = "config.json"


@dataclass(frozen=True)
class HashedBase:
    """A base as a new run has it."""

    model: ModelConfig
    """Without an adapter."""
    frozen: FrozenBase


def hash_base(folder: Path, wanted: Pretrained, home: Home, events: EventLog) -> HashedBase:
    """Hash the checkpoint in `folder` part by part, quantized where that is `wanted`, and note where it is. For a
    thread of trio's. Raises ConfigError, CheckpointError, ResourceError."""
    try:
        content = read_bounded(folder / _CONFIG, CONFIG_BYTES_MAX)
    except OSError as error:
        raise CheckpointError(
            f"{folder / _CONFIG} cannot be read ({error.strerror}): name the folder of a checkpoint in [model] base"
        ) from error
    model = read_base_config(content)
    wanted.check(model)
    quantization = chosen_quantization(saved_quantization(content), wanted.quantize)
    weight_files(folder)
    files = ParameterFiles([folder])
    check_names(folder, files, model)
    if model.tie_embeddings and files.has_head and not torch.equal(files.tensor(HEAD), files.tensor(EMBEDDING)):
        model = msgspec.structs.replace(model, tie_embeddings=False)
    weights = EvenWeights(model, own_dtype(files, model, quantization), quantization)
    stored_bytes(model, None, weights.dtype, quantization)
    trees = trio.from_thread.run(hash_parts, folder, files, weights, home.base, events)
    write_atomically(home.base_source, os.fsencode(folder.absolute()))
    frozen = FrozenBase(
        dtype=weights.dtype,
        quantization=quantization,
        cuts=weights.cuts,
        checkpoint=tuple(tree.root for tree in trees),
    )
    return HashedBase(model, frozen)


async def open_base(host: Host, home: Home, manifest: Manifest) -> HeldParts | None:
    """Return the parts of the run's base that are on this machine, for members that lack them; None where the whole
    model is trained. Event: base_missing. Raises CheckpointError, ResourceError."""
    weights = BaseWeights.of(manifest)
    if weights is None:
        return None
    source = Path(os.fsdecode(home.base_source.read_bytes())) if home.base_source.exists() else None
    held = HeldParts(host.events, weights, home.base, source if source is not None and source.is_dir() else None)
    await held.take_from_disk(range(len(weights.cuts)))
    missing = held.missing(range(len(weights.cuts)))
    if missing:
        host.events.emit(BaseMissing(parts=len(missing), folder=str(source or "")))
    return held
