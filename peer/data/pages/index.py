"""The index of a data set: what its pages hold, and the hash of each. The hash of the index names the data set.

A *window* is a row of seq_len + 1 token ids; with `masked`, a bit for each id follows that says whether it counts in
the loss. A *page* is as many whole windows as fit into `PAGE_BYTES_MAX`, the last page of a part fewer. Pages to train
on have the numbers from 0, held-out pages those after them.

Strangers make indices: every number is bounded and compared with the others before anything is allocated.
"""

from __future__ import annotations

from functools import cached_property
from typing import Annotated, Final, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from peer.bounds import HASH_BYTES, Number
from peer.config import TOKENS_MAX, VOCABULARY_MAX, PagesConfig, check_range
from peer.decoding import MALFORMED, decoder_of, told
from peer.errors import ConfigError

PAGE_BYTES_MAX: Final = 4 << 20
"""What one call of a state's transfer carries."""
INDEX_BYTES_MAX: Final = PAGE_BYTES_MAX
FORMAT: Final = 1
_TEXT_CHARS_MAX: Final = 1024
_UINT16_IDS: Final = 1 << 16

Line = Annotated[str, msgspec.Meta(max_length=_TEXT_CHARS_MAX)]


class PagePart(msgspec.Struct, frozen=True, kw_only=True):
    """The windows to train on, or those held out."""

    windows: Number
    documents: Number
    text_bytes: Number
    """Of these documents, as UTF-8."""
    hashes: Annotated[bytes, msgspec.Meta(max_length=INDEX_BYTES_MAX)]
    """The blake3 of each page, joined."""

    @property
    def pages(self) -> int:
        return len(self.hashes) // HASH_BYTES


class PageIndex(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The index of a data set; `encode_index` and `read_index` convert it to bytes and back."""

    format: Literal[1] = FORMAT
    seq_len: int
    vocab_size: int
    """Each id is below it."""
    dtype: Literal["uint16", "uint32"]
    """Of the ids, little-endian: the smaller one that holds the vocabulary."""
    masked: bool = False
    tokenizer: Annotated[str, msgspec.Meta(pattern=r"\A(bytes|[0-9a-f]{64})\Z")]
    """"bytes", or the hex blake3 of the tokenizer.json."""
    tokenizers: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The release of the library that made the ids; "" for bytes."""
    end_of_text: Annotated[str, msgspec.Meta(max_length=64)] = ""
    """The special token after each document; "" for an empty line."""
    seed: Number = 0
    """Of the documents' order."""
    validation_share: float
    chat_template: Annotated[str, msgspec.Meta(pattern=r"\A([0-9a-f]{64})?\Z")] = ""
    """Of a data set of conversations: the hex blake3 of the template that wrote them."""
    license: Line = ""
    source: Line = ""
    """Where the text is from."""
    train: PagePart
    held_out: PagePart

    def __post_init__(self) -> None:
        check_range(self, 1, TOKENS_MAX, "seq_len")
        check_range(self, 1, VOCABULARY_MAX, "vocab_size")
        check_range(self, 0, 1, "validation_share")
        if self.dtype != dtype_of(self.vocab_size):
            raise ValueError(f"dtype is {self.dtype}: a vocabulary of {self.vocab_size} ids takes the other one")
        for text in (self.tokenizers, self.end_of_text, self.license, self.source):
            if not text.isprintable():
                raise ValueError(f"the text {text!a} is not printable: leave out control characters")
        if self.masked != bool(self.chat_template):
            raise ValueError("masked and chat_template do not belong together")
        if self.row_bytes > PAGE_BYTES_MAX:
            raise ValueError(f"seq_len is {self.seq_len}: a window must fit into a page of {PAGE_BYTES_MAX} bytes")
        for name, part in (("train", self.train), ("held_out", self.held_out)):
            if part.windows < 1:
                raise ValueError(f"{name} has no window: add text, or lower seq_len")
            if len(part.hashes) != HASH_BYTES * -(-part.windows // self.page_windows):
                raise ValueError(
                    f"{name} has {part.windows} windows and {len(part.hashes)} bytes of hashes: these do not belong"
                    " together"
                )

    @cached_property
    def row_bytes(self) -> int:
        """The size of a window."""
        ids = self.seq_len + 1
        return ids * np.dtype(self.dtype).itemsize + (-(-ids // 8) if self.masked else 0)

    @cached_property
    def page_windows(self) -> int:
        """The windows of each page but the last of a part."""
        return PAGE_BYTES_MAX // self.row_bytes

    @property
    def pages(self) -> int:
        """The number of pages, those held out among them."""
        return self.train.pages + self.held_out.pages

    @property
    def size_bytes(self) -> int:
        """Of all pages."""
        return (self.train.windows + self.held_out.windows) * self.row_bytes

    def rows(self, page: int) -> int:
        """Return the number of windows of a page."""
        part, at = (self.train, page) if page < self.train.pages else (self.held_out, page - self.train.pages)
        return min(self.page_windows, part.windows - at * self.page_windows)

    def page_bytes(self, page: int) -> int:
        """Return the size of a page."""
        return self.rows(page) * self.row_bytes

    def hash_of(self, page: int) -> bytes:
        """Return the blake3 of a page, 0 to `pages` - 1."""
        part, at = (self.train, page) if page < self.train.pages else (self.held_out, page - self.train.pages)
        return part.hashes[at * HASH_BYTES : (at + 1) * HASH_BYTES]

    def matches(self, page: int, data: bytes | bytearray | memoryview) -> bool:
        """Whether `data` is exactly that page."""
        return len(data) == self.page_bytes(page) and blake3(data).digest() == self.hash_of(page)

    def ids(self, rows: bytes | bytearray | memoryview) -> npt.NDArray[np.uint16] | npt.NDArray[np.uint32]:
        """Return the token ids of whole windows, (n, seq_len + 1), without a copy. Raises ValueError for an id outside
        the vocabulary."""
        table = np.frombuffer(rows, np.uint8).reshape(-1, self.row_bytes)
        width = (self.seq_len + 1) * np.dtype(self.dtype).itemsize
        ids = table[:, :width].view(np.dtype(self.dtype).newbyteorder("<"))
        if ids.size and int(ids.max()) >= self.vocab_size:
            raise ValueError(f"id {ids.max()} is not in the vocabulary of {self.vocab_size}")
        return ids

    def marks(self, rows: bytes | bytearray | memoryview) -> npt.NDArray[np.bool_]:
        """Return which token of whole windows counts in the loss, (n, seq_len + 1); of a data set with a mask."""
        table = np.frombuffer(rows, np.uint8).reshape(-1, self.row_bytes)
        width = (self.seq_len + 1) * np.dtype(self.dtype).itemsize
        return np.unpackbits(table[:, width:], axis=1, count=self.seq_len + 1, bitorder="little").astype(np.bool_)

    @property
    def config(self) -> PagesConfig:
        """What a manifest says of the data set."""
        encoded = encode_index(self)
        return PagesConfig(
            root=blake3(encoded).hexdigest(),
            index_bytes=len(encoded),
            row_bytes=self.row_bytes,
            windows=self.train.windows,
            held_out_windows=self.held_out.windows,
        )


def dtype_of(vocab_size: int) -> Literal["uint16", "uint32"]:
    """Return the type of the ids of a vocabulary."""
    return "uint16" if vocab_size <= _UINT16_IDS else "uint32"


def check_vocabulary(index: PageIndex, vocab_size: int) -> None:
    """Raise ConfigError if a model of that vocabulary has no room for the ids of a data set."""
    if index.vocab_size > vocab_size:
        raise ConfigError(
            f"the data set has ids below {index.vocab_size} and the model only {vocab_size}: raise [model] vocab_size,"
            " or name a data set of the model's tokenizer"
        )


def encode_index(index: PageIndex) -> bytes:
    """Return the bytes whose blake3 names the data set. Raises ConfigError for more pages than an index may name."""
    encoded = msgspec.msgpack.encode(index)
    if len(encoded) > INDEX_BYTES_MAX:
        raise ConfigError(
            f"the data set has {index.pages} pages, and an index names about {INDEX_BYTES_MAX // HASH_BYTES}: build"
            " several data sets of fewer files"
        )
    return encoded


def read_index(encoded: bytes, name: str, wanted: PagesConfig | None = None) -> PageIndex:
    """Read an index; `name` is its name in errors, `wanted` what a manifest says of it. Raises ConfigError."""
    if len(encoded) > INDEX_BYTES_MAX:
        raise ConfigError(f"{name} is larger than {INDEX_BYTES_MAX >> 20} MiB, so it is no index of pages")
    if wanted is not None and blake3(encoded).hexdigest() != wanted.root:
        raise ConfigError(f"{name} is of another data set than the run's, {wanted.root[:16]}: name that one's folder")
    try:
        index: PageIndex = decoder_of(PageIndex).decode(encoded)
        if encode_index(index) != encoded:
            raise ValueError("it is not in the one form that an index has")
        if wanted is not None and index.config != wanted:
            raise ValueError("its sizes are not those that the manifest names")
    except (*MALFORMED, ValueError) as error:
        raise ConfigError(f"{name} is no index of pages ({told(error)}): `peer data build` writes one") from error
    return index
