"""Log-probabilities of the tokens of a prompt, from the hidden states of the tokens before them.

Logits (rows, V) of a long prompt would take gigabytes. They are made for some rows at a time, and of each row only the
log-probability of its next token and the likeliest ones are kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import torch
from torch import Tensor

LOGITS_MAX: Final = 1 << 22
"""Logits at once, but for a row at least."""
Score = tuple[float, list[tuple[int, float]]]
"""The log-probability of a token, and the likeliest tokens at its position with theirs, the likeliest first."""


class PromptScorer:
    """The prompt of one session, which ends before position `end`. `count`: of likeliest tokens at each position."""

    def __init__(self, end: int, count: int, vocab_size: int) -> None:
        self._end, self._count, self._rows = end, count, max(1, LOGITS_MAX // vocab_size)
        self._held: tuple[int, Tensor] | None = None
        """A position, and the row (C,) after it, which waits for the next token."""

    def take(
        self, position: int, rows: Tensor, known: Sequence[int], logits: Callable[[Tensor], Tensor]
    ) -> tuple[int, list[Score]]:
        """Return the scores of the tokens that follow hidden states (count, C) from a position on, and the position of
        the first of these tokens. `known`: the session's tokens, from position 0 on. `logits`: of rows. Raises
        ValueError for logits that are not finite."""
        if self._held is not None and self._held[0] == position - 1:
            position, rows = position - 1, torch.cat((self._held[1].unsqueeze(0), rows))
        self._held = None
        targets = known[position + 1 : min(position + len(rows) + 1, self._end)]
        if len(targets) < len(rows) and position + len(targets) + 1 < self._end:
            self._held = position + len(targets), rows[len(targets)].clone()
        found = list[Score]()
        for start in range(0, len(targets), self._rows):
            part = targets[start : start + self._rows]
            found += _scores(logits(rows[start : start + len(part)]), part, self._count)
        return position + 1, found

    def cut(self, position: int) -> None:
        """Forget the rows from a position on."""
        if self._held is not None and self._held[0] >= position:
            self._held = None


def _scores(logits: Tensor, targets: Sequence[int], count: int) -> list[Score]:
    """Return the score of the token behind each row, of logits (N, V). Raises ValueError for some that are not
    finite."""
    total = logits.logsumexp(-1, keepdim=True)
    if not bool(torch.isfinite(total).all()):
        raise ValueError("logits that are not finite")
    wanted = torch.tensor(targets, device=logits.device).unsqueeze(1)
    best = logits.topk(min(count, logits.shape[-1]))
    # log_softmax would make (N, V) once more; rounding may bring a sure token above 0
    of_token = (logits.gather(1, wanted) - total).clamp(max=0.0).squeeze(1).tolist()
    of_best = (best.values - total).clamp(max=0.0).tolist()
    found = zip(of_token, best.indices.tolist(), of_best, strict=True)
    return [(logprob, list(zip(ids, values, strict=True))) for logprob, ids, values in found]
