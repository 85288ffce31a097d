"""Cloze tasks of four choices from held-out text: a downstream figure for byte models, beside chance (1 of 4).

A task is a place in the text before a word of 3 to 8 letters. The choices are that word and three other words of the
same length, drawn from other places, so that common words are common among the wrong choices, too. A model answers with
the word whose bytes it finds likeliest after the text before.
"""

from __future__ import annotations

import random
import re
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

from benchmarks.training.byte_task import SEQ, Task

TASKS: Final = 1_000
CHOICES: Final = 4
WORD: Final = re.compile(rb"(?<![A-Za-z_0-9])[A-Za-z_]{3,8}(?![A-Za-z_0-9])")
AT_ONCE: Final = 128  # windows


@dataclass(frozen=True)
class Cloze:
    """The tasks. `tokens`, (N, 4, SEQ + 1): the text before, then a choice at the end; the first choice is right.
    `lengths`, (N,): bytes of a choice."""

    tokens: torch.Tensor
    lengths: torch.Tensor


def draw(text: bytes, seed: int, count: int = TASKS) -> Cloze:
    """Draw the tasks from the text by a seed."""
    dice = random.Random(f"cloze-{seed}")
    words: dict[int, list[tuple[int, bytes]]] = {}
    for match in WORD.finditer(text, SEQ):
        words.setdefault(len(match[0]), []).append((match.start(), match[0]))
    told_apart = {length for length, found in words.items() if len({word for _, word in found}) >= CHOICES}
    places = [(length, n) for length in sorted(told_apart) for n in range(len(words[length]))]
    tokens = np.empty((count, CHOICES, SEQ + 1), dtype=np.int64)
    lengths = np.empty(count, dtype=np.int64)
    for number, (length, n) in enumerate(dice.sample(places, count)):
        start, right = words[length][n]
        choices = [right]
        while len(choices) < CHOICES:
            word = dice.choice(words[length])[1]
            if word not in choices:
                choices.append(word)
        before = text[start - (SEQ + 1 - length) : start]
        tokens[number] = [list(before + choice) for choice in choices]
        lengths[number] = length
    return Cloze(torch.from_numpy(tokens), torch.from_numpy(lengths))


def accuracy(task: Task, weights: torch.Tensor, cloze: Cloze) -> float:
    """Return the share of the tasks that the weights (P,) answer rightly."""
    counts = (torch.arange(SEQ) >= SEQ - cloze.lengths[:, None]).float()  # (N, T): the bytes of the choice
    windows = cloze.tokens.view(-1, SEQ + 1)
    losses = torch.cat([task.losses(weights, part) for part in windows.split(AT_ONCE)]).view(-1, CHOICES, SEQ)
    likeliest = (losses * counts[:, None]).sum(2).argmin(1)
    return float((likeliest == 0).float().mean())
