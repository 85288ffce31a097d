"""Messages that a person types: a line each, or several lines between marks of three quotes."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from typing import Final, Protocol

from cli.terminal.stream import write_text
from cli.terminal.typed_lines import LINE_BYTES_MAX, TypedLines
from peer.errors import ConfigError

MARK: Final = '"""'
PROMPT: Final = "> "
CONTINUED: Final = "... "
TOO_LONG: Final = f"a message has more than {LINE_BYTES_MAX >> 20} MiB: give a shorter one"


@dataclass(frozen=True)
class Message:
    """What was typed, without marks."""

    text: str
    is_command: bool = False
    """Whether it is one line without marks that begins with a slash."""


class Messages(Protocol):
    """Where messages come from."""

    is_terminal: bool
    """Whether a person types them."""

    async def next(self) -> Message | None:
        """Return the next message; None after the last one. Raises ConfigError for an invalid one, and the next
        call continues after it; KeyboardInterrupt if the user wants to end."""


def can_edit() -> bool:
    """Whether a person can edit what is typed: both streams are terminals, and can do more than lines."""
    lines_only = os.environ.get("TERM", "").lower() in ("", "dumb", "unknown")
    return sys.stdin.isatty() and sys.stdout.isatty() and not lines_only


def ends_block(line: str, is_first: bool) -> bool:
    """Whether a line ends what a mark has begun. `is_first`: it is the line that begins with it."""
    return line[len(MARK) if is_first else 0 :].rstrip().endswith(MARK)


def is_open(text: str) -> bool:
    """Whether a text begins with a mark, and none of its lines ends that block."""
    lines = text.split("\n")
    return text.startswith(MARK) and not any(ends_block(line, not number) for number, line in enumerate(lines))


def message_of(text: str) -> Message:
    """Return the message that a text is. One of several lines that is no block, as it was pasted, stays as it is."""
    *before, last = text.split("\n")
    if text.startswith(MARK) and not is_open(text) and (not before or is_open("\n".join(before))):
        assert ends_block(last, not before)
        return Message(text.rstrip()[len(MARK) : -len(MARK)].strip("\n"))
    return Message(text.strip("\n")) if before else Message(text.strip(), is_command=text.startswith("/"))


class LineMessages:
    """Messages in the lines of a pipe, a file, or a terminal that can do no more."""

    def __init__(self) -> None:
        self._lines = TypedLines()
        self.is_terminal = self._lines.is_terminal

    async def next(self) -> Message | None:
        """See `Messages`. A block without an end is none."""
        line = await self._line(PROMPT)
        if line is None:
            return None
        if not is_open(line):
            return message_of(line)
        block, size = [line], len(line)
        while (line := await self._line(CONTINUED)) is not None:
            size += len(line) + 1
            if size <= LINE_BYTES_MAX:
                block.append(line)
            if ends_block(line, is_first=False):
                if size > LINE_BYTES_MAX:
                    raise ConfigError(TOO_LONG)
                return message_of("\n".join(block))
        raise ConfigError(f"the message that {MARK} began has no end: end its last line with {MARK}")

    async def _line(self, prompt: str) -> str | None:
        if self.is_terminal:
            write_text(prompt)
        return await self._lines.next()
