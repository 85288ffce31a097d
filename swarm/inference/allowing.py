"""How far the last server of a session may draw: some tokens ahead, or under a grammar one by one, each under a mask.

A grammar's mask needs the token before it. The last server still sends that on at once, so the next position is
computed meanwhile; only its draw waits for the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from peer.ipc.grammar_messages import TokenMask
from peer.worker.grammar.client import AnswerGrammar
from swarm.inference.masks import KeptMasks
from swarm.inference.messages import Allow

AHEAD_TOKENS: Final = 32
"""So many tokens are drawn before the client has taken the first of them."""
_MASKED_AHEAD: Final = 2
"""The token under the mask, and the one that is computed meanwhile."""


class Allowing:
    """What one session allows its last server. `grammar`: of its one answer; None: any token may come."""

    def __init__(self, grammar: AnswerGrammar | None) -> None:
        self.ceiling = 0
        """The position below which tokens were ever allowed."""
        self._grammar = grammar
        self.given = 0
        """The position after the last prompt."""
        self._allowed = 0
        """How far tokens may be drawn, since the last revision."""
        self._answer_from = 0
        self._mask: tuple[int, TokenMask] | None = None
        """That of the position that comes next."""
        self._sent_at: int | None = None
        """The position of the last mask that was sent in this revision."""
        self._sent = KeptMasks()

    @property
    def is_masked(self) -> bool:
        return self._grammar is not None

    @property
    def is_complete(self) -> bool:
        """Whether the grammar has come to its end."""
        return self._mask is not None and self._mask[1].is_complete

    def begin(self, given: int, is_new: bool) -> None:
        """Note that tokens are to follow a text of this length. `is_new`: an answer begins there."""
        self.given, self._allowed = given, 0
        if is_new:
            self._answer_from, self._mask = given, None

    def wired(self) -> None:
        """Note that the last server has allowed nothing yet in this revision."""
        self._allowed, self._sent_at, self._sent = 0, None, KeptMasks()

    def forget(self) -> None:
        """Note that the session has another id, which nothing was allowed yet."""
        self.ceiling = 0
        self.wired()

    async def follow(self, tokens: Sequence[int]) -> None:
        """Make the mask of the position after the session's tokens. Raises GrammarRefused, ConfigError, WorkerError."""
        if self._grammar is not None and (self._mask is None or self._mask[0] != len(tokens)):
            self._mask = len(tokens), await self._grammar.mask(tokens[self._answer_from :])

    def at_start(self, known: int, end: int) -> int:
        """Return how far tokens may be drawn at first. `known`: tokens of the session; `end`: the most."""
        allowed = min(end, known + (_MASKED_AHEAD if self.is_masked else AHEAD_TOKENS))
        self.ceiling = max(self.ceiling, allowed)
        return allowed

    def next(self, session: bytes, known: int, end: int) -> tuple[Allow, bytes] | None:
        """Return what lets the last server draw on, and its payload; None if it may already."""
        if self.is_masked:
            return self._next_mask(session, known, end)
        allowed = min(end, known + AHEAD_TOKENS)
        if not (allowed == end > self._allowed or allowed >= self._allowed + AHEAD_TOKENS // 2):
            return None
        self._allowed, self.ceiling = allowed, max(self.ceiling, allowed)
        return Allow(session, allowed, self.given), b""

    def _next_mask(self, session: bytes, known: int, end: int) -> tuple[Allow, bytes] | None:
        if self._mask is None or self._mask[0] != known or self._sent_at == known:
            return None
        self._sent_at = known
        allowed = min(end, known + _MASKED_AHEAD)
        self.ceiling = max(self.ceiling, allowed)
        return Allow(session, allowed, self.given), self._sent.pack(known, self._mask[1].bits)

    def allows(self, position: int, token: int, known: int) -> bool:
        """Whether a good server may have drawn this token. One that the client has already is not looked at."""
        if position >= self.ceiling:
            return False
        if not self.is_masked or position < known:
            return True
        if self._mask is None or self._mask[0] != position:
            return False  # it had no mask for that
        bits = self._mask[1].bits
        return token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)

    def close(self) -> None:
        """Let the grammar's process forget the answer; it may continue all the same."""
        if self._grammar is not None:
            self._grammar.close()
