"""Sampling that any server can repeat: the noise depends on the seed and the position alone.

A token is the argmax of filtered logits / temperature plus Gumbel noise, which draws from their softmax (Gumbel 1954;
Maddison et al., 1411.0030). The noise comes from a counter-based generator, Philox (Salmon et al. 2011), keyed by
(seed, position): a server that takes over draws the same token from the same logits.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor

from peer.ipc.sampling_options import Sampling


def sample(
    logits: Tensor, sampling: Sampling, position: int, seen: Sequence[int] = (), mask: Tensor | None = None
) -> int:
    """Return the token at `position` from its logits (V,) fp32. `seen`: the tokens before it, for the penalties.
    `mask` (V,) fp32: inf for the tokens that may be drawn, of which there is one at least, -inf for others; None: any
    may. It comes before all else."""
    if mask is not None:
        logits = logits.minimum(mask)  # several times as fast as a fill by Booleans
    scores = adjusted(logits, sampling, seen)
    if sampling.temperature <= 0:
        return int(scores.argmax())
    scores = filtered(scores / sampling.temperature, sampling)
    return int((scores.cpu() + gumbel(sampling.seed, position, len(logits))).argmax())


def adjusted(logits: Tensor, sampling: Sampling, seen: Sequence[int]) -> Tensor:
    """Return logits (V,) with the biases, then the penalty on repetition, for all tokens before, then those on
    frequency and presence, for the tokens of the answer. vLLM has the same order. `logits` stays as it is."""
    scores = _raised(logits, dict(sampling.logit_bias))
    if sampling.repetition_penalty != 1.0 and len(seen):
        before = torch.tensor(sorted(set(seen)), device=logits.device)
        values = scores[before]
        penalty = sampling.repetition_penalty
        scores = scores.clone()
        scores[before] = torch.where(values > 0, values / penalty, values * penalty)
    if not sampling.counts:
        return scores
    frequency, presence = sampling.frequency_penalty, sampling.presence_penalty
    counts = Counter(seen[sampling.counted_from :])
    return _raised(scores, {token: -(count * frequency + presence) for token, count in counts.items()})


def _raised(scores: Tensor, by: Mapping[int, float]) -> Tensor:
    """Return scores (V,), those of some tokens raised."""
    if not by:
        return scores
    tokens = torch.tensor(list(by), device=scores.device)
    return scores.index_add(0, tokens, torch.tensor(list(by.values()), dtype=scores.dtype, device=scores.device))


def filtered(scores: Tensor, sampling: Sampling) -> Tensor:
    """Return scores (V,), already divided by the temperature, with -inf for tokens that must not be drawn: top-k, then
    top-p, then min-p, as `transformers` orders them. The likeliest token stays."""
    kept = scores
    if 0 < sampling.top_k < len(scores):
        kept = kept.masked_fill(kept < kept.topk(sampling.top_k).values[-1], -math.inf)
    if sampling.top_p < 1.0:
        ordered, order = kept.sort(descending=True, stable=True)
        before = ordered.softmax(-1).cumsum(-1).roll(1)  # the probability of all likelier ones
        before[0] = 0.0
        kept = kept.masked_fill((before >= sampling.top_p)[order.argsort()], -math.inf)
        kept[order[0]] = ordered[0]
    if sampling.min_p > 0.0:
        shares = kept.softmax(-1)
        kept = kept.masked_fill(shares < sampling.min_p * shares.max(), -math.inf)
    return kept


def gumbel(seed: int, position: int, size: int) -> Tensor:
    """Return Gumbel noise (size,) fp32: the same for the same seed and position, on every machine."""
    bits = np.random.Philox(key=np.array([seed, position], dtype=np.uint64)).random_raw(size)
    uniform = ((bits >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53  # in (0, 1)
    return torch.from_numpy((-np.log(-np.log(uniform))).astype(np.float32))


def top_logprobs(logits: Tensor, token: int, count: int) -> tuple[float, list[tuple[int, float]]]:
    """Return the log-probability of a token, and the likeliest tokens with theirs, from logits (V,)."""
    logprobs = logits.log_softmax(-1)
    best = logprobs.topk(min(count, len(logits)))
    return float(logprobs[token]), list(zip(best.indices.tolist(), best.values.tolist(), strict=True))
