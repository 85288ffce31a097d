"""The weights of a served model, in parts: one a block, so that a server fetches only what it computes.

A part is the parameters of its blocks in canonical order (`FlatLayout`), in the type of the checkpoint; the first has
the embedding, the last one the final norm and the head. The manifest has the hash of each part. Servers read parts from
a checkpoint on their disk, or fetch them from each other, and check either.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Final, Protocol

import torch
import trio
from torch import Tensor

from peer.checkpoint.hash_tree import StateBytes, StateTree, hash_state
from peer.config import ModelConfig
from peer.errors import CheckpointError, ProtocolViolation, ResourceError
from peer.events import EventLog
from peer.ipc.block_messages import HiddenType
from peer.ipc.span import Span
from peer.model.layout import FlatLayout
from peer.model.parameter_files import ParameterFiles
from peer.net.host import Host
from peer.net.rpc import Buffer, Call, Rpc
from swarm.run.manifest import BlockRange, ServedModelManifest
from swarm.state.chunk_fetch import ChunkFetch
from swarm.state.messages import AskChunk, AskHashes, StateMethods, StateReply
from swarm.state.partial_file import PartFile
from swarm.state.upload_limits import SnapshotLimits, UploadSlots

_DTYPES: Final[dict[HiddenType, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16}
_NAMES: Final[dict[HiddenType, str]] = {"fp32": "F32", "bf16": "BF16"}
_COPY_BYTES: Final = 16 << 20


class Weights(Protocol):
    """The weights of a model, in parts: a `ServedModelManifest`, or what follows a run."""

    @property
    def model(self) -> ModelConfig: ...

    @property
    def dtype(self) -> HiddenType: ...

    @property
    def cuts(self) -> tuple[BlockRange, ...]:
        """The blocks of each part."""


def part_tensors(files: ParameterFiles, model: ModelConfig, dtype: HiddenType, span: Span) -> list[Tensor]:
    """Return the bytes of a part, a flat uint8 tensor for each parameter; mapped from the files where they have that
    type. Raises CheckpointError."""
    layout = FlatLayout.of(model, span)
    found = []
    for name, slot in layout.slots.items():
        tensor = files.tensor(name)
        if tuple(tensor.shape) != slot.shape:
            raise CheckpointError(
                f"{name} has shape {tuple(tensor.shape)}, not {slot.shape}: use the config.json of these weights"
            )
        found.append(tensor.to(_DTYPES[dtype]).contiguous().flatten().view(torch.uint8))
    return found


def part_bytes(model: ModelConfig, dtype: HiddenType, span: Span) -> int:
    """Return the size of a part."""
    return FlatLayout.of(model, span).numel * _DTYPES[dtype].itemsize


def part_spans(weights: Weights) -> list[Span]:
    """Return the blocks of each part."""
    return [Span(first, end, weights.model.layers) for first, end in weights.cuts]


def parts_of(manifest: ServedModelManifest, span: Span) -> list[int]:
    """Return the numbers of the parts that a span needs."""
    return [number for number, (first, end) in enumerate(manifest.cuts) if first < span.end and span.first < end]


class PartStore:
    """The parts that this peer serves to others, mapped from its files."""

    def __init__(self, manifest: ServedModelManifest, limits: SnapshotLimits | None = None) -> None:
        self._manifest = manifest
        self._parts: dict[bytes, tuple[StateTree, StateBytes]] = {}
        self._slots = UploadSlots(limits or SnapshotLimits())

    @property
    def roots(self) -> frozenset[bytes]:
        """The hashes of the parts that this peer has."""
        return frozenset(self._parts)

    def add(
        self,
        files: ParameterFiles,
        number: int,
        hashed: Callable[[int], None] | None = None,
        tree: StateTree | None = None,
    ) -> bool:
        """Serve a part from now on, if the files match the manifest. Blocks while it is hashed, and reports the hashed
        bytes to `hashed`. With `tree` it has just been hashed."""
        manifest, span = self._manifest, part_spans(self._manifest)[number]
        tensors = part_tensors(files, manifest.model, manifest.dtype, span)
        tree = tree or hash_state(tensors, hashed)
        if tree.root != manifest.checkpoint[number]:
            return False
        self._parts[tree.root] = (tree, StateBytes(tensors))
        return True

    def serve(self, rpc: Rpc) -> None:
        """Answer other servers from now on."""
        manifest = self._manifest
        largest = max(part_bytes(manifest.model, manifest.dtype, span) for span in part_spans(manifest))
        methods = StateMethods.of(largest, 0)
        rpc.register(methods.hashes, self._hashes)
        rpc.register(methods.chunk, self._chunk)

    async def _hashes(self, call: Call[AskHashes]) -> StateReply | tuple[StateReply, Buffer]:
        part = self._parts.get(call.body.state_hash)
        return StateReply("gone") if part is None else (StateReply("here"), b"".join(part[0].hashes))

    async def _chunk(self, call: Call[AskChunk]) -> StateReply | tuple[StateReply, Buffer]:
        part = self._parts.get(call.body.state_hash)
        if part is None:
            return StateReply("gone")
        tree, held = part
        if not 0 <= call.body.index < len(tree.hashes):
            raise ProtocolViolation(f"asked for chunk {call.body.index} of {len(tree.hashes)}")
        start, end = tree.span(call.body.index)
        pin = await self._slots.acquire(call.peer, end - start)
        if isinstance(pin, float):
            return StateReply("busy", pin)
        pin += await trio.to_thread.run_sync(held.copy, start, end)  # the first reading comes from the disk
        return StateReply("here"), pin


def part_path(folder: Path, number: int) -> Path:
    """Return the file of a fetched part."""
    return folder / f"part-{number:04}.safetensors"


async def fetch_part(
    host: Host,
    donors: Callable[[], Iterable[str]],
    manifest: ServedModelManifest,
    number: int,
    folder: Path,
    events: EventLog,
) -> None:
    """Fetch a part from peers that have it into its file. If this fails, the received bytes stay for the next attempt.
    Raises NetworkError, ResourceError. Events: state_progress."""
    span = part_spans(manifest)[number]
    size, root = part_bytes(manifest.model, manifest.dtype, span), manifest.checkpoint[number]
    path = folder / f"part-{number:04}.part"
    part = await trio.to_thread.run_sync(PartFile, path, size)
    try:
        tree = await ChunkFetch(host.rpc, donors, root, part, events).run()
        if await trio.to_thread.run_sync(part.intact, tree) != part.chunks:
            raise ResourceError(f"{path} reads back other bytes than were written: check that disk")
    finally:
        part.close()
    await trio.to_thread.run_sync(_finish, path, part_path(folder, number), _header(manifest, span))


def _header(manifest: ServedModelManifest, span: Span) -> bytes:
    """Return the header of the safetensors file whose data is the part."""
    width, kind, table = _DTYPES[manifest.dtype].itemsize, _NAMES[manifest.dtype], {}
    for name, slot in FlatLayout.of(manifest.model, span).slots.items():
        begin = slot.offset * width
        table[name] = {"dtype": kind, "shape": slot.shape, "data_offsets": (begin, begin + slot.numel * width)}
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _finish(source: Path, target: Path, header: bytes) -> None:
    """Turn the arrived bytes into a safetensors file. Raises ResourceError."""
    partial = target.with_suffix(".tmp")
    try:
        with source.open("rb") as arrived, partial.open("wb") as file:
            file.write(header)
            while piece := arrived.read(_COPY_BYTES):
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(target)
        source.unlink()
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise ResourceError(
            f"{target} cannot be written ({error.strerror}): free space, or choose another --home"
        ) from error


def missing_parts(store: PartStore, manifest: ServedModelManifest, numbers: Sequence[int]) -> list[int]:
    """Return those of the parts that are not on the store."""
    return [number for number in numbers if manifest.checkpoint[number] not in store.roots]
