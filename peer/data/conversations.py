"""Conversations of a data set: lists of messages in its files, and texts of which a part counts in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Final

import msgspec

ANSWERER: Final = "assistant"
MESSAGES: Final = "messages"
"""The field that holds the messages where the user names none."""
SHARED: Final = "conversations"
"""The one that holds them in an object without `MESSAGES`, as data sets in the form of ShareGPT have it."""
_SHARED_ROLES: Final = {"human": "user", "gpt": ANSWERER}
_MESSAGES_MAX: Final = 10_000

Span = tuple[int, int]
"""Half-open, of characters."""


class FileMessage(msgspec.Struct):
    """One message of a file."""

    role: Annotated[str, msgspec.Meta(max_length=64)]
    content: str


class _SharedMessage(msgspec.Struct):
    """One message in the form of ShareGPT."""

    role: Annotated[str, msgspec.Meta(max_length=64)] = msgspec.field(name="from")
    content: str = msgspec.field(name="value")


Conversation = Annotated[list[FileMessage], msgspec.Meta(max_length=_MESSAGES_MAX)]

_SharedConversation = Annotated[list[_SharedMessage], msgspec.Meta(max_length=_MESSAGES_MAX)]


@dataclass(frozen=True)
class MarkedText:
    """A text, and what of it counts in the loss."""

    text: str
    spans: tuple[Span, ...]
    how: str
    """How it was found; of a conversation without a text why there is none."""


def messages_of(value: Any) -> list[FileMessage]:
    """Return the messages of a list of plain objects, which have `role` and `content`, or as ShareGPT's `from` and
    `value`, whose `human` and `gpt` are the user and the assistant. Raises msgspec.ValidationError for any other."""
    try:
        return msgspec.convert(value, Conversation)
    except msgspec.ValidationError:
        shared = msgspec.convert(value, _SharedConversation)
    return [FileMessage(_SHARED_ROLES.get(each.role, each.role), each.content) for each in shared]


def encode_conversation(messages: list[FileMessage]) -> bytes:
    """Return the one form of a conversation, JSON; empty without a message."""
    return msgspec.json.encode(messages) if messages else b""


def decode_conversation(encoded: bytes) -> list[dict[str, str]]:
    """Return the messages of what `encode_conversation` made."""
    return [{"role": each.role, "content": each.content} for each in msgspec.json.decode(encoded, type=Conversation)]
