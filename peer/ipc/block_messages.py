"""Messages between the network process and the worker of a span of blocks: the worker's first message, and the records
of their two rings (`peer.ipc.ring`).

    record    u32 bytes of the head, little endian | the head, a tagged msgpack array | the payload

A payload holds hidden states (count, C), little endian, in the type that the session has chosen for the wire. The
worker refuses what makes no sense to its engine (`StepRefusal`). The network process does not trust the worker, which
computes on numbers of strangers: the worker's records have bounds, and a malformed one ends it. Imports no torch.
"""

from __future__ import annotations

import struct
from typing import Annotated, Final, Literal

import msgspec

from peer.bounds import Hash, Number, Text
from peer.config import TOKENS_MAX, VOCABULARY_MAX, AdapterConfig, HiddenType, ModelConfig, Quantization
from peer.decoding import MALFORMED, told
from peer.ipc.sampling_options import LIKELIEST_MAX, Sampling
from peer.ipc.span import Span

ROWS_MAX: Final = 64
PAGE_TOKENS: Final = 16
"""Of a page, the unit in which keys and values are counted and shared."""
CHUNK_TOKENS: Final = 256
LOGPROB_MIN: Final = -1e9
"""Lower log-probabilities are reported as this one."""
SCORES_MAX: Final = 64
"""Positions of a prompt in one message: 64 fit a small one with all their likeliest tokens."""
REASON_MAX: Final = 300
_HEAD: Final = struct.Struct("<I")
_RING_BYTES_MIN: Final = 1 << 20
_CHUNKS: Final = 4  # in a ring: a record may take half of it
_ID_BYTES: Final = 8  # at most what one token id takes in a head

HIDDEN_BYTES: Final[dict[HiddenType, int]] = {"fp32": 4, "bf16": 2}
"""Of one value."""
WireType = Literal["fp32", "bf16", "int8"]
"""In which hidden states cross the wire. int8: a row has an fp32 scale for each `GROUP` of its values, then these."""
WIRE_TYPES: Final[tuple[WireType, ...]] = ("fp32", "bf16", "int8")
GROUP: Final = 256
RefusalCause = Literal["gap", "full", "shape", "value", "not_finite", "unknown"]
Position = Annotated[int, msgspec.Meta(ge=0, le=TOKENS_MAX)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=VOCABULARY_MAX)]
Logprob = Annotated[float, msgspec.Meta(ge=LOGPROB_MIN, le=-LOGPROB_MIN)]
Likeliest = Annotated[tuple[tuple[TokenId, Logprob], ...], msgspec.Meta(max_length=LIKELIEST_MAX)]
Reason = Annotated[str, msgspec.Meta(max_length=REASON_MAX)]
Fds = tuple[int, int, int]


class RingEnds(msgspec.Struct, frozen=True):
    """Inherited descriptors of a ring (`Ring.fds`), and its size."""

    fds: Fds
    size_bytes: int


class LoadAdapter(msgspec.Struct, frozen=True):
    """An adapter beside the blocks: the folder of its file, and its sizes."""

    folder: str
    adapter: AdapterConfig


class LoadBlocks(msgspec.Struct, frozen=True, tag="load_blocks", kw_only=True):
    """The first message to a worker that serves a span of blocks."""

    model: ModelConfig
    span: Span
    dtype: HiddenType
    window: int | None
    """How many tokens a token sees, itself included; None for all."""
    folders: tuple[str, ...]
    """The folders of .safetensors files to read the parameters from; the first that holds a parameter counts."""
    directory: str
    """The one folder that the worker may write."""
    device: str
    pages: int
    """Of all sessions' keys and values together (`peer.inference.cache`)."""
    rows_max: int
    """Sessions that generate in one step."""
    chunk_tokens: int
    """Tokens of a prompt in one step."""
    to_worker: RingEnds
    from_worker: RingEnds
    quantization: Quantization | None = None
    """Of the matrices inside of the blocks (`peer.footprint.stored`); None: they are in `dtype`."""
    adapters: tuple[LoadAdapter, ...] = ()
    """What sessions may choose, by number."""
    gives_way: bool = False
    """Whether another worker of this peer trains on the same processors, which goes first."""


# -- to the worker -----------------------------------------------------------------------------------------------------


class OpenSession(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Begins a session that uses the blocks of the span from `first` to before `end`; None for all. The answer is
    SessionOpened or StepRefusal."""

    session: Number
    sampling: Sampling
    names: Annotated[tuple[Hash, ...], msgspec.Meta(max_length=TOKENS_MAX)] = ()
    """Of the pages with which the session begins (`CachePool.open`). Only pages that end before the last token of the
    prompt: what the session has already is not computed, and so no token follows it."""
    first: Number | None = None
    end: Number | None = None
    wire: WireType | None = None
    """Of the hidden states that come and go; None: the span's type."""
    client: Text = ""
    """Whose it is: clients take turns, and share the pages."""
    prefix: Text = ""
    """That of the client's address: prefixes take turns and share the pages, and the clients of one its part."""
    adapter: Number | None = None
    """The number of an adapter of `LoadBlocks`; None for none."""


class ComputeTokens(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The next tokens of a session, and unless it uses the first block, their hidden states as the payload. Tokens that
    the session already has are dropped. The answers are SpanOutputs, in pieces of any size, or one StepRefusal."""

    session: Number
    position: Number
    """Of the first of them."""
    count: Number
    ids: Annotated[tuple[Number, ...], msgspec.Meta(max_length=TOKENS_MAX)]
    samples: bool
    """Whether the last block is to be followed by a drawn token."""


class RewindSession(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """Has a session forget its positions from one on. There is no answer, unless it is refused."""

    session: Number
    position: Number


class CloseSession(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Ends a session; there is no answer."""

    session: Number


class SetMask(msgspec.Struct, frozen=True, array_like=True, tag=9):
    """Says which tokens may be drawn at a position of a session whose `sampling` is masked. The payload has a bit for
    each token of the vocabulary, the least significant one of a byte first. If the token was waited for, the answer is
    MaskedToken."""

    session: Number
    position: Number


# -- from the worker ---------------------------------------------------------------------------------------------------


class SessionOpened(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """A session has begun."""

    session: Number
    have: Position
    """The positions already present."""


class SpanOutput(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """A step's output for one session. The payload holds the hidden states after its blocks; it is empty after the last
    one."""

    session: Number
    position: Position
    """Of the first token that went in."""
    count: Position
    token: TokenId | None
    """The token after them, where one was asked for."""
    logprob: Logprob
    """Of that token, if the session asks for log-probabilities."""
    likeliest: Likeliest
    ids: Annotated[tuple[TokenId, ...], msgspec.Meta(max_length=TOKENS_MAX)]
    """Of the tokens that went in."""
    wire: WireType | None = None
    """Of the payload, as the session was opened."""


class StepRefusal(msgspec.Struct, frozen=True, array_like=True, tag=7):
    """A record that the worker does not follow; the session is as before. For "not_finite" it may come in place of an
    output: the session then has what is before those tokens."""

    session: Number
    cause: RefusalCause
    message: Reason
    have: Position = 0
    """The positions of the session that are computed, or wait for their turn."""


class MaskedToken(msgspec.Struct, frozen=True, array_like=True, tag=10):
    """A token that waited for its mask; its SpanOutput came without one."""

    session: Number
    position: Position
    token: TokenId
    logprob: Logprob
    likeliest: Likeliest


class ScoredPrompt(msgspec.Struct, frozen=True, array_like=True, tag=11):
    """Log-probabilities of some tokens of the prompt, in a session that asks for them. They come before the output of
    the step in which they were computed."""

    session: Number
    position: Position
    """Of the first of these tokens."""
    scores: Annotated[tuple[tuple[Logprob, Likeliest], ...], msgspec.Meta(min_length=1, max_length=SCORES_MAX)]
    """Of each token, with the likeliest tokens at its position."""


class WorkerLoad(msgspec.Struct, frozen=True, array_like=True, tag=8):
    """The worker's load; sent at most every half second, when it has changed."""

    pages_free: Number
    sessions: Number
    waiting_tokens: Number
    step_ms: Annotated[float, msgspec.Meta(ge=0, le=1e9)]
    """The smoothed duration of steps without a part of a prompt; 0 before the first."""
    rows: Annotated[float, msgspec.Meta(ge=0, le=1e6)]
    """The smoothed number of sessions in these steps."""


ToBlocks = OpenSession | ComputeTokens | RewindSession | CloseSession | SetMask
FromBlocks = SessionOpened | SpanOutput | StepRefusal | WorkerLoad | MaskedToken | ScoredPrompt

_encoder: Final = msgspec.msgpack.Encoder()
_to_blocks: Final[msgspec.msgpack.Decoder[ToBlocks]] = msgspec.msgpack.Decoder(ToBlocks)
_from_blocks: Final[msgspec.msgpack.Decoder[FromBlocks]] = msgspec.msgpack.Decoder(FromBlocks)


def pack(message: ToBlocks | FromBlocks) -> bytes:
    """Return a record without its payload, which follows it in the ring."""
    head = _encoder.encode(message)
    return _HEAD.pack(len(head)) + head


def unpack_to_worker(record: memoryview) -> tuple[ToBlocks, memoryview]:
    """Return the message of a record to the worker, and its payload in place. Raises ValueError."""
    head, payload = _parts(record)
    return _to_blocks.decode(head), payload


def unpack_from_worker(record: memoryview, load: LoadBlocks) -> tuple[FromBlocks, bytes]:
    """Return the message of a record from the worker that received `load`, and a copy of its payload. Raises
    ValueError."""
    head, rest = _parts(record)
    try:
        message = _from_blocks.decode(head)
    except MALFORMED as error:
        raise ValueError(told(error)) from error
    payload = bytes(rest)
    if isinstance(message, SpanOutput):
        _check_output(message, len(payload), load)
    elif isinstance(message, MaskedToken):
        _check_token(message, len(payload), load)
    elif isinstance(message, ScoredPrompt):
        _check_scores(message, len(payload), load)
    elif payload:
        raise ValueError(f"{type(message).__name__} with a payload of {len(payload)} bytes")
    return message, payload


def row_bytes(hidden_size: int, wire: WireType) -> int:
    """Return what the hidden state of one token takes on the wire."""
    return 4 * -(-hidden_size // GROUP) + hidden_size if wire == "int8" else hidden_size * HIDDEN_BYTES[wire]


def row_bytes_max(hidden_size: int) -> int:
    """Return the same in the largest type."""
    return max(row_bytes(hidden_size, wire) for wire in WIRE_TYPES)


def ring_bytes(model: ModelConfig, chunk_tokens: int) -> int:
    """Return the size of a ring, in which there is room for several chunks of a prompt in any type."""
    row = row_bytes_max(model.hidden_size) + _ID_BYTES
    return max(_RING_BYTES_MIN, _CHUNKS * chunk_tokens * row)


def _parts(record: memoryview) -> tuple[bytes, memoryview]:
    """Cut a record into a copy of its head, which the other process cannot change, and its payload."""
    if len(record) < _HEAD.size:
        raise ValueError(f"a record of {len(record)} bytes")
    (size,) = _HEAD.unpack_from(record)
    end = _HEAD.size + size
    if end > len(record):
        raise ValueError(f"a head of {size} bytes in a record of {len(record)}")
    return bytes(record[_HEAD.size : end]), record[end:]


def _check_token(token: MaskedToken, payload_bytes: int, load: LoadBlocks) -> None:
    """Raise ValueError unless a token may be drawn by the span."""
    if payload_bytes or not load.span.is_last:
        raise ValueError("a drawn token with a payload, or before the last block")
    if token.position > load.model.max_seq_len:
        raise ValueError(f"a token at {token.position} in a context of {load.model.max_seq_len}")
    if max((token.token, *(id for id, _ in token.likeliest))) >= load.model.vocab_size:
        raise ValueError("a token outside the vocabulary")


def _check_scores(scored: ScoredPrompt, payload_bytes: int, load: LoadBlocks) -> None:
    """Raise ValueError unless these may be scores of the span."""
    if payload_bytes or not load.span.is_last:
        raise ValueError("scores of a prompt with a payload, or before the last block")
    if scored.position + len(scored.scores) > load.model.max_seq_len:
        raise ValueError(f"scores at {scored.position} in a context of {load.model.max_seq_len}")
    if any(token >= load.model.vocab_size for _, likeliest in scored.scores for token, _ in likeliest):
        raise ValueError("a score of a token outside the vocabulary")


def _check_output(output: SpanOutput, payload_bytes: int, load: LoadBlocks) -> None:
    """Raise ValueError unless an output is one of the span's."""
    model, last = load.model, load.span.is_last
    drawn = () if output.token is None else (output.token,)
    if not 1 <= output.count <= load.chunk_tokens or len(output.ids) != output.count:
        raise ValueError(f"an output of {output.count} tokens with {len(output.ids)} ids")
    if output.position + output.count > model.max_seq_len:
        raise ValueError(f"an output at {output.position} in a context of {model.max_seq_len}")
    if max((*output.ids, *drawn, *(token for token, _ in output.likeliest))) >= model.vocab_size:
        raise ValueError("an output with a token outside the vocabulary")
    if (drawn or output.likeliest) and (payload_bytes or not last):
        raise ValueError("a drawn token before the last block")
    hidden_bytes = output.count * row_bytes(model.hidden_size, output.wire or load.dtype)
    if payload_bytes != hidden_bytes and not (last and not payload_bytes):
        raise ValueError(f"{output.count} hidden states in {payload_bytes} bytes")
