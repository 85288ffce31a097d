"""One checkpoint: a folder of safetensors shards and a signed manifest of hashes, either complete or absent.

    000007-round-00000012/
      model-00001-of-00001.safetensors       outer weights under their canonical names
      momentum-00001-of-00001.safetensors    outer momentum under the same names
      manifest.msgpack                       run, round, head, layout, chunk hashes; signed; written last

One rename gives the folder its name, after its content has reached the disk. So SIGKILL or a power cut may leave a
`.tmp-` folder, but never half a checkpoint.
"""

from __future__ import annotations

import errno
import math
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final

import msgspec
import torch
from torch import Tensor

from peer import faults
from peer.bounds import TENSORS_MAX, Count, Number, ParameterName, Text
from peer.checkpoint.generation import StateGeneration
from peer.checkpoint.hash_tree import StateTree, StreamHasher, chunk_size_for, hash_list_bytes, hash_state
from peer.checkpoint.mapped_floats import FLOAT_BYTES
from peer.checkpoint.safetensors_file import (
    Shard,
    check_shard,
    map_shard,
    place_of,
    plan_shards,
    read_shard,
    write_shard,
)
from peer.config import PARAMETERS_MAX, check_range
from peer.decoding import MALFORMED, told
from peer.errors import CheckpointError, ProtocolViolation
from peer.files import fsync_path, read_bounded
from peer.identity import Identity, Signed, open_body, sign_body
from peer.model.layout import FlatLayout, TensorSlot

MANIFEST: Final = "manifest.msgpack"
TEMPORARY: Final = ".tmp-"  # prefix of folders that are being written or deleted
VECTORS_MAX: Final = 8
ROUND_MAX: Final = 1 << 40
_KIND: Final = "checkpoint"
_MANIFEST_BYTES_MAX: Final = 64 << 20
_PLAIN: Final = re.compile(r"[\w.-]+\.safetensors", re.ASCII)


class CheckpointManifest(msgspec.Struct, frozen=True):
    """The signed description of a checkpoint."""

    run_id: Text
    round: Count
    head: Annotated[bytes, msgspec.Meta(max_length=1 << 20)]
    """The caller's; opaque here."""
    layout: Annotated[dict[ParameterName, TensorSlot], msgspec.Meta(max_length=TENSORS_MAX)]
    numel: Number
    vectors: Annotated[tuple[Text, ...], msgspec.Meta(max_length=VECTORS_MAX)]
    """The names of the flat vectors, theta first."""
    shards: Annotated[tuple[Shard, ...], msgspec.Meta(max_length=VECTORS_MAX * TENSORS_MAX)]
    tree: StateTree
    """The hash tree of the vectors."""

    def __post_init__(self) -> None:
        check_range(self, 0, ROUND_MAX, "round")
        check_range(self, 1, PARAMETERS_MAX, "numel")


@dataclass(frozen=True)
class LoadedCheckpoint:
    """A verified checkpoint."""

    round: int
    head: bytes
    tensors: dict[str, Tensor]
    """"theta" and the other vectors of the run's method, flat fp32, shape (P,), in the order in which `tree` hashes
    them."""
    tree: StateTree
    """`tree.root` is the state hash."""
    layout: FlatLayout
    signer: str
    path: Path

    @property
    def theta(self) -> Tensor:
        return self.tensors["theta"]


def describe(run_id: str, round: int, head: bytes, state: StateGeneration, layout: FlatLayout) -> CheckpointManifest:
    """Plan the files of a state, and hash it if its tree is not known."""
    shards = tuple(plan_shards(layout, state.vectors))
    return CheckpointManifest(run_id, round, head, dict(layout.slots), layout.numel, state.vectors, shards, state.tree)


def write_checkpoint(path: Path, identity: Identity, manifest: CheckpointManifest, state: StateGeneration) -> None:
    """Write the folder `path` atomically. Raises OSError, and CheckpointError if the state in memory is not what it was
    when it was hashed; either may leave a `.tmp-` folder."""
    building = path.with_name(TEMPORARY + path.name)
    building.mkdir()
    if not _link(building, manifest, state):
        hasher = StreamHasher(state.size_bytes)
        for shard in manifest.shards:
            pieces = state.pieces(shard.vector, place_of(shard, manifest.layout))
            write_shard(building, shard, manifest.layout, map(hasher.passed, pieces))
        if hasher.tree().root != manifest.tree.root:
            raise CheckpointError("the state in memory is not the one that was hashed")
    faults.reach("during_checkpoint", manifest.round)
    signed = sign_body(identity, _KIND, manifest)
    (building / MANIFEST).write_bytes(msgspec.msgpack.encode(signed))
    fsync_path(building / MANIFEST)
    fsync_path(building)
    building.rename(path)
    fsync_path(path.parent)


def _link(building: Path, manifest: CheckpointManifest, state: StateGeneration) -> bool:
    """Give the files of a state a second name, once the disk has them; return False where that is not possible."""
    try:
        for shard in manifest.shards:
            os.link(state.files[shard.vector], building / shard.file)
            fsync_path(building / shard.file)
    except (KeyError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.EIO:
            raise  # the disk has lost bytes of it
        for shard in manifest.shards:
            (building / shard.file).unlink(missing_ok=True)
        return False
    return True


def load_checkpoint(path: Path, run_id: str | None = None, signer: str | None = None) -> LoadedCheckpoint:
    """Read and verify the checkpoint in folder `path`. Raises CheckpointError.

    `run_id` demands that run, `signer` that peer's signature: any peer can sign. Vectors stay mapped from their files,
    where these are as `write_checkpoint` makes them. Nothing is allocated before the files are known to hold as much as
    the manifest says. Blocks for about 0.5 s per GB: call it in a thread.
    """
    manifest, signed_by = _read_manifest(path / MANIFEST)
    if signer is not None and signed_by != signer:
        raise CheckpointError(f"{path} is signed by {signed_by}, not by {signer}: use a checkpoint of this home's key")
    if run_id is not None and manifest.run_id != run_id:
        raise CheckpointError(f"{path} belongs to another run ({manifest.run_id}): choose a checkpoint of run {run_id}")
    layout = FlatLayout(manifest.layout, manifest.numel)
    for shard in manifest.shards:
        check_shard(path, shard, manifest.layout)
    vectors = {vector: _vector(path, vector, manifest) for vector in manifest.vectors}
    tree = hash_state(list(vectors.values()))
    if tree.root != manifest.tree.root:
        raise CheckpointError(
            f"{path} is corrupt (its contents differ from the hash in its manifest): use another checkpoint"
        )
    if not all(torch.isfinite(flat.norm()) for flat in vectors.values()):
        raise CheckpointError(f"{path} holds values that are not finite: use another checkpoint")
    return LoadedCheckpoint(manifest.round, manifest.head, vectors, tree, layout, signed_by, path)


def _vector(path: Path, vector: str, manifest: CheckpointManifest) -> Tensor:
    """Return a vector of the checkpoint in folder `path`: mapped, or read from files that another release wrote."""
    shards = [shard for shard in manifest.shards if shard.vector == vector]
    if shards[0].names == tuple(manifest.layout):
        mapped = map_shard(path, shards[0], manifest.layout)
        if mapped is not None:
            return mapped
    flat = torch.empty(manifest.numel)
    views = FlatLayout(manifest.layout, manifest.numel).views(flat)
    for shard in shards:
        read_shard(path, shard, views)
    return flat


def _read_manifest(file: Path) -> tuple[CheckpointManifest, str]:
    try:
        signed = msgspec.msgpack.decode(read_bounded(file, _MANIFEST_BYTES_MAX), type=Signed)
        manifest = open_body(signed, _KIND, CheckpointManifest)
    except (OSError, *MALFORMED, ProtocolViolation) as error:
        raise CheckpointError(f"{file} cannot be used ({told(error)}): use another checkpoint") from error
    _check(manifest, file)
    return manifest, signed.signer


def _check(manifest: CheckpointManifest, file: Path) -> None:
    """Check that the parameters cover the vectors without gaps, and that the shards hold each parameter once."""
    offset = 0
    for slot in manifest.layout.values():
        if slot.offset != offset or slot.numel < 1:
            raise CheckpointError(f"{file} describes a layout with gaps: use another checkpoint")
        if not 1 <= len(slot.shape) <= 2 or min(slot.shape) < 1 or math.prod(slot.shape) != slot.numel:
            raise CheckpointError(f"{file} describes a parameter of an impossible shape: use another checkpoint")
        offset += slot.numel
    held = sorted((shard.vector, name) for shard in manifest.shards for name in shard.names)
    wanted = sorted((vector, name) for vector in manifest.vectors for name in manifest.layout)
    size = len(manifest.vectors) * manifest.numel * FLOAT_BYTES
    if offset != manifest.numel or held != wanted or manifest.tree.size_bytes != size:
        raise CheckpointError(f"{file} does not describe a whole state: use another checkpoint")
    tree = manifest.tree
    if tree.chunk_size != chunk_size_for(size) or len(b"".join(tree.hashes)) != hash_list_bytes(size):
        raise CheckpointError(f"{file} has a hash tree of another state: use another checkpoint")
    if "theta" not in manifest.vectors or len(manifest.vectors) > VECTORS_MAX:
        raise CheckpointError(f"{file} holds no weights, or too many vectors: use another checkpoint")
    if any(not _PLAIN.fullmatch(shard.file) for shard in manifest.shards):
        raise CheckpointError(f"{file} names a file outside its folder: do not use this checkpoint")
