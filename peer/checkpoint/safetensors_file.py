"""Flat vectors as safetensors files, with parameters under their canonical names."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peer.bounds import TENSORS_MAX, ParameterName, Text
from peer.checkpoint.mapped_floats import FLOAT_BYTES, map_floats, map_writable
from peer.decoding import told
from peer.errors import CheckpointError
from peer.files import reserve
from peer.model.layout import FlatLayout, TensorSlot

_OF_ONE: Final = "00001-of-00001"
FILE_PREFIX: Final = {"theta": "model", "momentum": "momentum"}  # names that other software expects
_SIZE_BYTES: Final = 8  # of the header's size, at the start of the file
_PAGE_BYTES: Final = 4096
_HEADER_BYTES_MAX: Final = 100 << 20  # what the safetensors library accepts


class Shard(msgspec.Struct, frozen=True):
    """One file: some parameters of one flat vector, in layout order."""

    file: Annotated[str, msgspec.Meta(max_length=256)]
    vector: Text
    names: Annotated[tuple[ParameterName, ...], msgspec.Meta(max_length=TENSORS_MAX)]


def plan_shards(layout: FlatLayout, vectors: Sequence[str]) -> list[Shard]:
    """Return the files of a state: one a vector, so that it is mapped as a whole."""
    names = tuple(layout.slots)
    return [Shard(f"{FILE_PREFIX.get(vector, vector)}-{_OF_ONE}.safetensors", vector, names) for vector in vectors]


def place_of(shard: Shard, slots: Mapping[str, TensorSlot]) -> slice:
    """Return which values of its flat vector a file holds: parameters that follow each other."""
    first, last = slots[shard.names[0]], slots[shard.names[-1]]
    return slice(first.offset, last.offset + last.numel)


def write_shard(directory: Path, shard: Shard, slots: Mapping[str, TensorSlot], pieces: Iterable[memoryview]) -> None:
    """Write one file and wait until the disk has it. Raises OSError. `pieces`: the bytes of its `place_of`.

    The safetensors library writes from whole tensors only. The values lie in the file as in the flat vector, from a
    page's border on."""
    with (directory / shard.file).open("wb") as file:
        file.write(_header(shard, slots))
        for piece in pieces:
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def create_shard(directory: Path, shard: Shard, slots: Mapping[str, TensorSlot]) -> Tensor:
    """Make a file as `write_shard` does, and return its values, not yet written: writing to them changes the file.
    Raises OSError if there is no room for them."""
    header, place = _header(shard, slots), place_of(shard, slots)
    size = len(header) + FLOAT_BYTES * (place.stop - place.start)
    with (directory / shard.file).open("w+b") as file:
        reserve(file.fileno(), size)
        file.write(header)
        file.flush()
        return map_writable(file.fileno(), size)[len(header) // FLOAT_BYTES :]


def map_shard(directory: Path, shard: Shard, slots: Mapping[str, TensorSlot]) -> Tensor | None:
    """Return a file's values, mapped; None if they do not lie as `write_shard` writes them. Raises CheckpointError."""
    path, header, place = directory / shard.file, _header(shard, slots), place_of(shard, slots)
    size = len(header) + FLOAT_BYTES * (place.stop - place.start)
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size != size or file.read(len(header)) != header:
                return None
        return map_floats(path, size)[len(header) // FLOAT_BYTES :]
    except (OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} cannot be read ({told(error)}): use another checkpoint") from error


def _header(shard: Shard, slots: Mapping[str, TensorSlot]) -> bytes:
    """Return what a file begins with, up to a page's border."""
    begin = slots[shard.names[0]].offset
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    for name in shard.names:
        slot = slots[name]
        offsets = [FLOAT_BYTES * (slot.offset - begin), FLOAT_BYTES * (slot.offset + slot.numel - begin)]
        header[name] = {"dtype": "F32", "shape": slot.shape, "data_offsets": offsets}
    text = msgspec.json.encode(header)
    size = -(-(_SIZE_BYTES + len(text)) // _PAGE_BYTES) * _PAGE_BYTES - _SIZE_BYTES
    return size.to_bytes(_SIZE_BYTES, "little") + text.ljust(size)


def check_shard(directory: Path, shard: Shard, slots: Mapping[str, TensorSlot]) -> None:
    """Raise CheckpointError unless the file has the size of these parameters and a header, which is checked later."""
    path = directory / shard.file
    size = sum(slots[name].numel * FLOAT_BYTES for name in shard.names)
    try:
        found = path.lstat()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error.strerror}): use another checkpoint") from error
    if not stat.S_ISREG(found.st_mode) or not size < found.st_size <= size + _HEADER_BYTES_MAX:
        raise CheckpointError(f"{path} is no file of {size} bytes of parameters: use another checkpoint")


def read_shard(directory: Path, shard: Shard, views: Mapping[str, Tensor]) -> None:
    """Read one file into `views`. Raises CheckpointError if it is missing, torn, or different from its manifest."""
    path = directory / shard.file
    try:
        with safe_open(path, framework="pt") as file:
            if set(file.keys()) != set(shard.names):
                raise CheckpointError(f"{path} holds other parameters than its manifest says: use another checkpoint")
            for name in shard.names:
                tensor = file.get_tensor(name)
                if tensor.shape != views[name].shape or tensor.dtype != views[name].dtype:
                    raise CheckpointError(
                        f"{name} in {path} has another shape or dtype than in the manifest: use another"
                    )
                views[name].copy_(tensor)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"{path} cannot be read ({told(error)}): use another checkpoint") from error
