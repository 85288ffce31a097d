"""Merging: who counts how much, and the owner's sum."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

import torch

from optim.codecs import Codec

TOKEN_CAP = 3.0  # no contributor counts for more than this many times the median number of tokens
NORM_BAND = 3.0  # a norm further than this factor from the median is an accident or an attack
BAND_FROM = 3  # with fewer contributors there is no telling who is the odd one out


def contribution_weights(tokens: Sequence[int], norms: Sequence[float]) -> tuple[float, ...]:
    """Weight of each contribution in the merged mean; 0 for one that the gate refuses.

    Weights are tokens, capped, normalised over those that pass; an update longer than the median is clipped to it.
    Independent of order up to the order of the result.
    """
    if not norms:
        return ()
    middle = median(norms)
    if len(norms) >= BAND_FROM and middle > 0:
        passed = [middle / NORM_BAND <= norm <= middle * NORM_BAND for norm in norms]
    else:
        passed = [norm < float("inf") for norm in norms]
    cap = TOKEN_CAP * median(tokens)
    capped = [min(float(t), cap) if ok else 0.0 for t, ok in zip(tokens, passed, strict=True)]
    total = sum(sorted(capped))
    if total == 0:
        return tuple(0.0 for _ in norms)
    clips = [min(1.0, middle / norm) if norm > 0 else 1.0 for norm in norms]
    return tuple(c / total * clip for c, clip in zip(capped, clips, strict=True))


def merge_part(
    codec: Codec, encoded: Sequence[bytes | memoryview], weights: Sequence[float], numel: int, out_codec: Codec
) -> torch.Tensor:
    """Weighted sum of encoded slices, in the given order, encoded once: uint8."""
    total = torch.zeros(numel)
    work = torch.empty(numel)
    for data, weight in zip(encoded, weights, strict=True):
        codec.decode(data, numel, work)
        total.add_(work.mul_(weight))
    return out_codec.encode(total)
