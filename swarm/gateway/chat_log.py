"""A conversation kept in a file: one message a line, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec

from peer.decoding import MALFORMED, told
from peer.errors import ConfigError
from peer.files import read_bounded, write_atomically
from swarm.gateway.template import ChatMessage

BYTES_MAX: Final = 16 << 20


class ChatLog:
    """The file of one conversation."""

    def __init__(self, path: Path) -> None:
        """Raises ConfigError for a file that holds something else."""
        self._path = path
        self.messages()

    def messages(self) -> list[ChatMessage]:
        """Return what was said; nothing where there is no file yet. Raises ConfigError."""
        try:
            lines = read_bounded(self._path, BYTES_MAX).splitlines()
        except FileNotFoundError:
            return []
        except OSError as error:
            raise ConfigError(f"{self._path} cannot be read ({error.strerror}): name another file") from error
        return [self._message(number, line) for number, line in enumerate(lines, 1) if line.strip()]

    def _message(self, number: int, line: bytes) -> ChatMessage:
        try:
            return msgspec.json.decode(line, type=ChatMessage)
        except MALFORMED as error:
            raise ConfigError(
                f"line {number} of {self._path} is no message of a chat ({told(error)}): correct or delete it, or"
                " name another file with --history"
            ) from error

    def write(self, messages: Sequence[ChatMessage]) -> None:
        """Replace what the file holds. Raises ResourceError."""
        lines = b"".join(msgspec.json.encode(message) + b"\n" for message in messages)
        write_atomically(self._path, lines)
