"""The protocol of the "text" program: a tokenizer or a chat template of strangers, apart from the network process."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec

from peer.config import VOCABULARY_MAX
from peer.ipc.messages import Command

TEXT_CHARS_MAX = 2 << 20
"""Of a text to tokenize, and of a conversation."""
DECODED_CHARS_MAX = 4 << 20
SEQUENCES_MAX = 1024
TOKEN_BYTES_MAX = 1 << 10
TEMPLATE_NAMES = frozenset(
    {
        *("messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token"),
        *("raise_exception", "strftime_now", "dict", "namespace", "range", "lipsum", "cycler", "joiner"),
    }
)
"""What every template has: its own variables and functions, which no request replaces."""

TokenId = Annotated[int, msgspec.Meta(ge=0, lt=VOCABULARY_MAX)]
TokenIds = Annotated[list[TokenId], msgspec.Meta(max_length=TEXT_CHARS_MAX)]
DecodedText = Annotated[str, msgspec.Meta(max_length=DECODED_CHARS_MAX)]


class LoadText(msgspec.Struct, frozen=True, tag="load_text", kw_only=True):
    """The first message to a worker for texts. It has a tokenizer, or a chat template, or both."""

    tokenizer: str = ""
    """The path of a tokenizer.json; "" for none."""
    vocab_size: int = 0
    """The model's: the tokenizer may have no more ids."""
    chat_template: str = ""
    bos: str = ""
    """The token before a text, as the template names it."""
    eos: str = ""
    directory: str
    """The one folder that the worker may write."""
    memory_bytes: int
    """The most that the process may allocate after it has loaded."""


class EncodeText(Command, frozen=True, tag="encode"):
    """Asks for the ids of a text."""

    text: str
    special: bool
    """With the tokens that the tokenizer adds around a text, such as one for its beginning."""


class DecodeTokens(Command, frozen=True, tag="decode"):
    """Asks for the text of each sequence of ids."""

    sequences: list[list[int]]


class BytesOfTokens(Command, frozen=True, tag="bytes_of"):
    """Asks for the bytes of tokens that are parts of letters, as TokensBytes."""

    ids: list[int]


class ListSpecial(Command, frozen=True, tag="special"):
    """Requests the ids of the tokenizer's special tokens, as TokenIds."""


class RenderChat(Command, frozen=True, tag="render"):
    """Asks for a conversation as text that ends where the assistant's next words begin, as a RenderedChat."""

    messages: list[dict[str, Any]]
    """Each with its role and content, and where it has them, as `transformers` gives them to a template: tool_calls,
    whose arguments are objects, tool_call_id and name."""
    tools: list[dict[str, Any]] | None = None
    """The functions that the model may call; None for none."""
    variables: dict[str, Any] = msgspec.field(default_factory=dict)
    """More variables of the template, by name. None has a name of `TEMPLATE_NAMES`."""


class RenderedChat(msgspec.Struct, frozen=True):
    """A conversation as text, or why the template does not write it."""

    text: Annotated[str, msgspec.Meta(max_length=DECODED_CHARS_MAX)] = ""
    fault: Annotated[str, msgspec.Meta(max_length=1024)] = ""


TextCommand = EncodeText | DecodeTokens | BytesOfTokens | ListSpecial | RenderChat
TokensBytes = Annotated[
    list[Annotated[bytes, msgspec.Meta(max_length=TOKEN_BYTES_MAX)] | None], msgspec.Meta(max_length=SEQUENCES_MAX)
]
"""None for a token whose bytes the tokenizer does not say."""
Texts = Annotated[list[DecodedText], msgspec.Meta(max_length=SEQUENCES_MAX)]
