"""A server's output in a session: kept, so that the server after it can be replaced."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

SESSION_BYTES_MAX: Final = 64 << 20
"""Of one session; the oldest outputs go first, and a replacement then needs the whole prompt again."""
RESENT_MAX: Final = 4
"""Bytes that may be sent again for each one that was computed: asking costs the client nothing, computing its turns."""


@dataclass(frozen=True)
class SentTokens:
    """Tokens that were sent on, with their hidden states."""

    position: int
    ids: tuple[int, ...]
    draws: bool
    payload: bytes

    @property
    def end(self) -> int:
        """The position after the last one."""
        return self.position + len(self.ids)

    def after(self, position: int) -> SentTokens:
        """Return the part from a position on."""
        skipped = max(0, position - self.position)
        width = len(self.payload) // len(self.ids)
        return SentTokens(self.position + skipped, self.ids[skipped:], self.draws, self.payload[skipped * width :])


class OutputLog:
    """The outputs of one session, from `base` on without gaps."""

    def __init__(self, base: int, bytes_max: int = SESSION_BYTES_MAX) -> None:
        self.base = base
        self._bytes_max = bytes_max
        self._size = self._resendable = 0
        self._sent: deque[SentTokens] = deque()

    @property
    def end(self) -> int:
        """The position after the last output."""
        return self._sent[-1].end if self._sent else self.base

    def append(self, sent: SentTokens) -> bool:
        """Add the next output, which replaces what is there from its position on. Return False, and leave it out, if it
        comes after a gap: it was computed before the log was rewound, and the next server cannot take it either."""
        if sent.position > self.end:
            return False
        self.rewind(sent.position)
        self._sent.append(sent)
        self._size += len(sent.payload)
        self._resendable += RESENT_MAX * len(sent.payload)
        self.fit(self._bytes_max)
        return True

    def fit(self, bytes_max: int) -> None:
        """Keep no more than that from now on, and the last output in any case."""
        self._bytes_max = bytes_max
        while self._size > self._bytes_max and len(self._sent) > 1:
            oldest = self._sent.popleft()
            self._size -= len(oldest.payload)
            self.base = oldest.end

    def rewind(self, position: int) -> None:
        """Forget the outputs from a position on."""
        while self._sent and self._sent[-1].end > position:
            last = self._sent.pop()
            self._size -= len(last.payload)
            if last.position < position:
                kept = position - last.position
                width = len(last.payload) // len(last.ids)
                part = SentTokens(last.position, last.ids[:kept], False, last.payload[: kept * width])
                self._sent.append(part)
                self._size += len(part.payload)
        self.base = min(self.base, position)

    def since(self, position: int, known: int, count_max: int) -> Iterator[SentTokens]:
        """Yield the outputs from a position on, joined to at most `count_max` tokens each, but not over a place where a
        token is to be drawn that the client does not have (`known`). ValueError if the log begins later, or its outputs
        were resent too often."""
        if position < self.base:
            raise ValueError(f"what was sent of this session is kept from {self.base} on, not from {position}")
        size = sum(len(sent.payload) for sent in self._sent if sent.end > position)
        if size > self._resendable:
            raise ValueError("what was sent of this session was sent again too often")
        self._resendable -= size
        joined: list[SentTokens] = []
        for sent in self._sent:
            if sent.end <= position:
                continue
            sent = sent.after(position)
            draws = bool(joined) and joined[-1].draws and joined[-1].end >= known
            if joined and (draws or sum(len(part.ids) for part in joined) + len(sent.ids) > count_max):
                yield _join(joined)
                joined = []
            joined.append(sent)
        if joined:
            yield _join(joined)


def _join(parts: list[SentTokens]) -> SentTokens:
    ids = tuple(token for part in parts for token in part.ids)
    return SentTokens(parts[0].position, ids, parts[-1].draws, b"".join(part.payload for part in parts))
