"""One session at an engine: its cache, its tokens that wait for a turn, and how its tokens are drawn."""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Final

from torch import Tensor

from peer.inference.cache import SessionCache
from peer.inference.masked_draws import MaskedDraws
from peer.inference.prompt_scorer import PromptScorer
from peer.inference.turns import Owner
from peer.ipc.sampling_options import Sampling
from peer.ipc.span import Span

LATELY_STEPS: Final = 16


@dataclass(frozen=True)
class WaitingTokens:
    """Tokens of one session that wait for their turn, or have it."""

    position: int
    ids: Sequence[int]
    hidden: Tensor | None
    samples: bool
    """Whether the last one of them is to be followed by a drawn token."""

    def before(self, count: int) -> WaitingTokens:
        """Return the first `count` of them, of more."""
        return WaitingTokens(
            self.position, self.ids[:count], None if self.hidden is None else self.hidden[:count], False
        )

    def behind(self, count: int) -> WaitingTokens:
        """Return what is left without the first `count`."""
        hidden = None if self.hidden is None else self.hidden[count:]
        return WaitingTokens(self.position + count, self.ids[count:], hidden, self.samples)


@dataclass
class EngineSession:
    """A session that is open at an engine."""

    part: Span
    """The blocks that it uses."""
    cache: SessionCache
    sampling: Sampling
    names: tuple[bytes, ...]
    owner: Hashable
    """Of the pages that it leaves: other blocks have other keys and values, and another client may call anything so."""
    client: Owner
    used_at: float
    """When it was opened, or something of it came or was computed last."""
    waiting: deque[WaitingTokens] = field(default_factory=deque)
    adapter: int | None = None
    """The number of its adapter; None: it has none."""
    masked: MaskedDraws | None = None
    """Of a session whose client says which tokens may be drawn."""
    scorer: PromptScorer | None = None
    """Of a session whose client wants the log-probabilities of its prompt."""
    turned_at: int = -LATELY_STEPS
    """The engine's step in which it last had a turn."""

    @property
    def expected(self) -> int:
        """The position that comes next, what waits included."""
        return len(self.cache.ids)

    def cut(self, position: int) -> None:
        """Forget the waiting tokens, and all from a position on."""
        self.waiting.clear()
        self.cache.length = min(self.cache.length, position)
        del self.cache.ids[self.cache.length :]
        if self.masked is not None:
            self.masked.cut(self.cache.length)
        if self.scorer is not None:
            self.scorer.cut(self.cache.length)
