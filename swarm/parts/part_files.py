"""The weights of a model in parts: one a block, so that a peer fetches only what it computes.

A part is the parameters of its blocks in canonical order, in the type of the checkpoint or quantized
(`peer.footprint.stored`); the first has the embedding, the last one the final norm and the head. The manifest has the
hash of each part. Servers read parts from a checkpoint on their disk, or fetch them from each other, and check either.
"""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Final

import torch
import trio
from torch import Tensor

from peer.checkpoint.hash_tree import StateBytes, StateTree, hash_state
from peer.errors import CheckpointError, ProtocolViolation, ResourceError
from peer.events import EventLog
from peer.footprint.stored import stored_tensors
from peer.ipc.span import Span
from peer.model.parameter_files import ParameterFiles
from peer.model.quantize import STORED_TYPES, stored_values
from peer.net.host import Host
from peer.net.rpc import Buffer, Call
from swarm.parts.weights import HashedWeights, Weights, part_bytes, part_spans
from swarm.state.chunk_fetch import ChunkFetch
from swarm.state.messages import AskChunk, AskHashes, AskResult, ResultPart, StateReply
from swarm.state.partial_file import PartFile
from swarm.state.upload_limits import SnapshotLimits, UploadSlots

_COPY_BYTES: Final = 16 << 20


def part_tensors(files: ParameterFiles, weights: Weights, span: Span) -> list[Tensor]:
    """Return the bytes of a part, a flat uint8 tensor for each stored one; mapped from the files where they have its
    type. Raises CheckpointError; also where the files hold no quantized form of a part that is to be quantized, which
    `quantize_part` makes."""
    found = []
    for stored in stored_tensors(weights.model, span.blocks, weights.dtype, weights.quantization):
        tensor, dtype = files.tensor(stored.name), STORED_TYPES[stored.type]
        if tuple(tensor.shape) != stored.shape:
            raise CheckpointError(
                f"{stored.name} has shape {tuple(tensor.shape)}, not {stored.shape}: use the config.json of these"
                " weights"
            )
        if not dtype.is_floating_point and tensor.dtype != dtype:
            raise CheckpointError(f"{stored.name} is not {weights.quantization}: quantize the checkpoint again")
        found.append(tensor.to(dtype).contiguous().flatten().view(torch.uint8))
    return found


class PartStore:
    """The parts that this peer serves to others, mapped from its files: a `swarm.state.server.StateStore`."""

    part_bytes_max: Final = 0

    def __init__(self, manifest: HashedWeights, slots: UploadSlots | None = None) -> None:
        """`slots`: of the peer, where it serves other data as well; None: of its own."""
        self._manifest = manifest
        self._parts: dict[bytes, tuple[StateTree, StateBytes]] = {}
        self._slots = UploadSlots(SnapshotLimits()) if slots is None else slots

    def clear(self) -> None:
        """Serve none of the parts any longer."""
        self._parts.clear()

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
        tensors = part_tensors(files, manifest, span)
        tree = tree or hash_state(tensors, hashed)
        if tree.root != manifest.checkpoint[number]:
            return False
        self._parts[tree.root] = (tree, StateBytes(tensors))
        return True

    @property
    def size_bytes(self) -> int:
        """The size of the largest part."""
        return max(part_bytes(self._manifest, span) for span in part_spans(self._manifest))

    def serves(self, state_hash: bytes) -> bool:
        """Return whether this peer has the part with that hash."""
        return state_hash in self._parts

    async def send_hashes(self, call: Call[AskHashes]) -> StateReply | tuple[StateReply, Buffer]:
        """Answer a request for the chunk hashes of a part."""
        part = self._parts.get(call.body.state_hash)
        return StateReply("gone") if part is None else (StateReply("here"), b"".join(part[0].hashes))

    async def send_chunk(self, call: Call[AskChunk]) -> StateReply | tuple[StateReply, Buffer]:
        """Answer a request for one chunk of a part."""
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

    async def send_result(self, call: Call[AskResult]) -> ResultPart:
        """Answer that there is none: parts do not change."""
        return ResultPart("gone")


def part_path(folder: Path, number: int) -> Path:
    """Return the file of a fetched part."""
    return folder / f"part-{number:04}.safetensors"


async def fetch_part(
    host: Host,
    donors: Callable[[], Iterable[str]],
    manifest: HashedWeights,
    number: int,
    folder: Path,
    events: EventLog,
) -> None:
    """Fetch a part from peers that have it into its file. If this fails, the received bytes stay for the next attempt.
    Raises NetworkError, ResourceError. Events: state_progress."""
    span = part_spans(manifest)[number]
    size, root = part_bytes(manifest, span), manifest.checkpoint[number]
    path = folder / f"part-{number:04}.part"
    part = await trio.to_thread.run_sync(PartFile, path, size)
    try:
        tree = await ChunkFetch(host.rpc, donors, root, part, events).run()
        if await trio.to_thread.run_sync(part.intact, tree) != part.chunks:
            raise ResourceError(f"{path} reads back other bytes than were written: check that disk")
    finally:
        part.close()
    await trio.to_thread.run_sync(_finish, path, part_path(folder, number), _header(manifest, span))


def quantize_part(files: ParameterFiles, weights: Weights, number: int, folder: Path) -> None:
    """Write the file of a part of a quantized model from the files of its checkpoint. Blocks. Raises CheckpointError,
    ConfigError, ResourceError."""
    assert weights.quantization is not None
    span = part_spans(weights)[number]
    values = stored_values(files, weights.model, span.blocks, weights.dtype, weights.quantization)
    write_part(weights, number, (tensor for _, tensor in values), folder)


def write_part(weights: Weights, number: int, tensors: Iterable[Tensor], folder: Path) -> None:
    """Write the file of a part, of its stored tensors in order. Blocks. Raises ResourceError."""
    pieces = (tensor.contiguous().flatten().view(torch.uint8).numpy().data for tensor in tensors)
    _write(part_path(folder, number), chain([_header(weights, part_spans(weights)[number])], pieces))


def _header(weights: Weights, span: Span) -> bytes:
    """Return the header of the safetensors file whose data is the part."""
    table, begin = {}, 0
    for stored in stored_tensors(weights.model, span.blocks, weights.dtype, weights.quantization):
        end = begin + stored.size_bytes
        table[stored.name] = {"dtype": stored.type, "shape": stored.shape, "data_offsets": (begin, end)}
        begin = end
    text = json.dumps(table).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _finish(source: Path, target: Path, header: bytes) -> None:
    """Turn the arrived bytes into a safetensors file. Raises ResourceError."""
    try:
        with source.open("rb") as arrived:
            _write(target, chain([header], iter(partial(arrived.read, _COPY_BYTES), b"")))
        source.unlink()
    except OSError as error:
        raise _unwritable(target, error) from error


def _write(target: Path, pieces: Iterable[Buffer]) -> None:
    """Write a file as a whole or not at all. Raises ResourceError."""
    unfinished = target.with_suffix(".tmp")
    try:
        with unfinished.open("wb") as file:
            for piece in pieces:
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        unfinished.replace(target)
    except OSError as error:
        raise _unwritable(target, error) from error
    finally:
        unfinished.unlink(missing_ok=True)  # also where a piece could not be made


def _unwritable(target: Path, error: OSError) -> ResourceError:
    return ResourceError(f"{target} cannot be written ({error.strerror}): free space, or choose another --home")
