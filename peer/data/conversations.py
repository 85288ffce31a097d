"""Conversations of a data set: lists of messages in its files, and texts of which a part counts in the loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final

import msgspec

ANSWERER: Final = "assistant"
MESSAGES: Final = "messages"
"""The field that holds the messages where the user names none."""
_MESSAGES_MAX: Final = 10_000

Span = tuple[int, int]
"""Half-open, of characters."""


class FileMessage(msgspec.Struct):
    """One message of a file."""

    role: Annotated[str, msgspec.Meta(max_length=64)]
    content: str


Conversation = Annotated[list[FileMessage], msgspec.Meta(max_length=_MESSAGES_MAX)]


@dataclass(frozen=True)
class MarkedText:
    """A text, and what of it counts in the loss."""

    text: str
    spans: tuple[Span, ...]
    how: str
    """How it was found; of a conversation without a text why there is none."""


def encode_conversation(messages: list[FileMessage]) -> bytes:
    """Return the one form of a conversation, JSON; empty without a message."""
    return msgspec.json.encode(messages) if messages else b""


def decode_conversation(encoded: bytes) -> list[dict[str, str]]:
    """Return the messages of what `encode_conversation` made."""
    return [{"role": each.role, "content": each.content} for each in msgspec.json.decode(encoded, type=Conversation)]
