"""The protocol between the network process and its compute workers: length-prefixed msgpack frames of typed messages.

This module holds the common part of all worker programs: the bases of commands and replies, and signs of life. Each
program's first message (`peer.ipc.first_message`) and its commands are in a module of its own: `train_messages`,
`stage_messages`, `corpus_messages`, `text_messages`, `build_messages`; a worker that serves blocks takes no commands,
but records (`block_messages`). The parent does not trust the worker, which computes on what strangers sent: its
messages have bounds, and a malformed one ends it. Tensors lie in shared memory (`peer.ipc.shared_memory`).
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Annotated, Any, Final, TypeVar

import msgspec

from peer.bounds import Hash, Number, Text
from peer.corpus_facts import CorpusFacts
from peer.decoding import MALFORMED, told
from peer.errors import StageReason, WorkerError
from peer.footprint.step_size import StepSize

MEETING: Final = "meeting-"
"""How the name of the file begins at which the ranks of a group meet."""
_LENGTH = struct.Struct(">I")
_FRAME_MAX = 16 << 20
_Body = TypeVar("_Body")
Sentence = Annotated[str, msgspec.Meta(max_length=4096)]


class VectorFds(msgspec.Struct, frozen=True):
    """Inherited descriptors of the flat vectors in shared memory. All ranks of a group map the same memory."""

    outer: int
    delta: int


class Command(msgspec.Struct, frozen=True):
    """The base of what a program can be asked. A worker answers each command with one `WorkerReply`."""

    id: int
    """Grows from command to command."""


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """Ends command `id` at its next step, once it has made `after_steps`. Of two stops the smaller count holds. A stop
    of a finished command has no effect."""

    id: int
    after_steps: int = 0


class Refusal(msgspec.Struct, frozen=True):
    """A StageRefused on its way to the network process."""

    message: Sentence
    reason: StageReason


class WorkerReply(msgspec.Struct, frozen=True, tag="reply"):
    """The answer to command `id`."""

    id: Number
    body: msgspec.Raw
    """The encoded result, of the type that belongs to the command."""
    error: Refusal | None = None
    """Why the worker refused the command; `body` is then empty."""

    def result(self, kind: type[_Body]) -> _Body:
        """Decode the body. Raises WorkerError."""
        try:
            return msgspec.msgpack.decode(self.body, type=kind)
        except MALFORMED as error:
            raise WorkerError(f"the compute worker answered what is no result ({told(error)}): see its log") from error


class CorpusFiles(msgspec.Struct, frozen=True):
    """The token ids of a corpus as the worker has written them: names of .npy files in the worker's directory."""

    train: Text
    held_out: Text


class ModelLoaded(msgspec.Struct, frozen=True, tag="loaded"):
    """The worker is ready."""

    device: Text
    bf16: bool
    compiled: bool
    windows: Number = 0
    """The number of samples in one epoch of this machine's corpus; 0 where the program reads no corpus."""
    corpus_digest: Hash = b""
    corpus: CorpusFacts | None = None
    corpus_files: CorpusFiles | None = None
    step_size: StepSize | None = None
    """Of a program that makes steps with batches."""
    memory_bytes: Number = 0
    """Of the device where it has its own; else 0."""
    fp16: bool = False


class Rejected(msgspec.Struct, frozen=True, tag="rejected"):
    """The configuration does not work on this machine. `message` can be shown to the user."""

    message: Sentence


class Beat(msgspec.Struct, frozen=True, tag="beat"):
    """A sign of life, sent every second. `ticks` grows with every step, which tells a busy worker from a stuck one."""

    ticks: Number


class WorkerEvent(msgspec.Struct, frozen=True, tag="event"):
    """An event for the peer's event log."""

    name: Text
    fields: Annotated[dict[Text, Sentence | int | float | bool | None], msgspec.Meta(max_length=64)]


FromWorker = ModelLoaded | Rejected | Beat | WorkerEvent | WorkerReply

_encoder = msgspec.msgpack.Encoder()


def frame(message: msgspec.Struct) -> bytes:
    """Encode the message for the socket."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def reply_to(command: Command, body: Any) -> WorkerReply:
    """Build the reply that carries `body`, a struct, a number or None."""
    return WorkerReply(command.id, msgspec.Raw(_encoder.encode(body)))


def refusal_of(command: Command, message: str, reason: StageReason) -> WorkerReply:
    """Build the reply that refuses the command."""
    return WorkerReply(command.id, msgspec.Raw(_encoder.encode(None)), Refusal(message, reason))


class ControlFrames:
    """Cuts a byte stream into frame bodies."""

    def __init__(self) -> None:
        self._pending = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Add received bytes; yield every body that is now complete."""
        self._pending += data
        while len(self._pending) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._pending)
            if length > _FRAME_MAX:
                raise ValueError(f"a control frame of {length} bytes: the two ends run different code")
            end = _LENGTH.size + length
            if len(self._pending) < end:
                return
            body = bytes(self._pending[_LENGTH.size : end])
            del self._pending[:end]
            yield body
