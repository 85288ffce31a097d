"""What the last server of a session draws: under which settings, how far, under which masks, with which scores.

Without a grammar it may draw some tokens ahead of the client. A grammar's mask needs the token before it: the last
server still sends that on at once, so the next position is computed meanwhile; only its draw waits for the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import msgspec

from peer.ipc.grammar_messages import TokenMask
from peer.ipc.sampling_options import Sampling
from peer.worker.grammar.client import AnswerGrammar
from swarm.inference.masks import KeptMasks
from swarm.inference.messages import Allow, TokenDrawn
from swarm.inference.prompt_scores import PromptScores

AHEAD_TOKENS: Final = 32
"""So many tokens are drawn before the client has taken the first of them."""
_MASKED_AHEAD: Final = 2
"""The token under the mask, and the one that is computed meanwhile."""


class Drawing:
    """The client's half: it says what may be drawn, and checks what was."""

    def __init__(
        self, sampling: Sampling, stops: Sequence[int], vocab_size: int, grammar: AnswerGrammar | None = None
    ) -> None:
        """`grammar`: of the session's one answer; None: any token may come."""
        self.sampling = msgspec.structs.replace(sampling, masked=grammar is not None)
        """The settings of the last answer."""
        self.stops: Final = tuple(stops)
        self.scores: Final = PromptScores(self.sampling, vocab_size)
        """Of the last prompt; complete when the first token of its answer comes."""
        self.given = 0
        """The position after the last prompt."""
        self.ceiling = 0
        """The position below which tokens were ever allowed."""
        self._vocab_size, self._grammar = vocab_size, grammar
        self._is_ahead = False
        """Whether more may have been drawn than was taken."""
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

    # -- answers -------------------------------------------------------------------------------------------------------

    def begin(self, known: int, prompt: int) -> bool:
        """Begin the answer to a prompt of this many tokens behind the `known` ones, or continue one without a prompt.
        Return whether the servers can go on with it: a session's servers read its settings once, and may have drawn
        tokens that the caller did not want."""
        before, was_ahead = self.sampling, self._is_ahead
        self.given, self._allowed, self._is_ahead = known + prompt, 0, True
        if prompt:
            self.sampling = self.sampling.of_answer(self.given)
            self._answer_from, self._mask = self.given, None
            self.scores.begin(self.given)
        return not was_ahead and self.sampling == before

    async def follow(self, tokens: Sequence[int]) -> None:
        """Make the mask of the position after the session's tokens. Raises GrammarRefused, ConfigError, WorkerError."""
        if self._grammar is not None and (self._mask is None or self._mask[0] != len(tokens)):
            self._mask = len(tokens), await self._grammar.mask(tokens[self._answer_from :])

    def ends(self, token: int, known: int, end: int) -> bool:
        """Whether the answer ends with this token, the last of the `known` ones. `end`: the most tokens."""
        is_last = known == end or token in self.stops or self.is_complete
        self._is_ahead = self.is_masked or not is_last
        return is_last

    # -- revisions -----------------------------------------------------------------------------------------------------

    def wired(self) -> None:
        """Note that the last server has been allowed nothing yet in this revision."""
        self._allowed, self._sent_at, self._sent = 0, None, KeptMasks()

    def forget(self) -> None:
        """Note that the session has another id, of which nothing has been allowed or scored yet."""
        self.ceiling = 0
        self.scores.forget()
        self.wired()

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

    # -- what comes ----------------------------------------------------------------------------------------------------

    def may_draw(self, drawn: TokenDrawn, known: int) -> bool:
        """Whether a good server may have drawn this token. One that the client has already is not looked at."""
        position, token = drawn.position, drawn.token
        if position >= self.ceiling or token >= self._vocab_size:
            return False
        if not self.is_masked or position < known:
            return True
        if self._mask is None or self._mask[0] != position:
            return False  # it had no mask for that
        bits = self._mask[1].bits
        return token >> 3 < len(bits) and bool(bits[token >> 3] >> (token & 7) & 1)

    def is_next(self, drawn: TokenDrawn, known: int) -> bool:
        """Whether a token continues the session; not one drawn twice, as after a replacement."""
        return drawn.position == known and self.scores.is_complete

    def close(self) -> None:
        """Let the grammar's process forget the answer; it may continue all the same."""
        if self._grammar is not None:
            self._grammar.close()
