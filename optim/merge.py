"""Merging: the gate (who counts, and how much) and the owner's weighted sum.

The gate needs no more than each contributor's token count and the norm of its whole update, both committed to before
anything is merged, so every peer computes the same weights; all of it is float64 in an order that does not depend on
the order of the contributors.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Final, Literal

import torch

from optim.codecs import ROW, Buffer, Codec
from optim.codecs.interface import as_bytes

CHUNK: Final = 64 * ROW  # values; the sum and one decoded contribution stay in the L2 cache
Reason = Literal["", "no_tokens", "not_finite", "norm_low", "norm_high"]


@dataclass(frozen=True)
class NormGate:
    """The rules of admission to a merge. Neither a norm nor a token count is taken at its word without a bound.

    `token_cap`: nobody counts for more tokens than this many times the median.

    `norm_band`: an update whose norm is more than this factor from the expected norm is left out. Peers do work in
    proportion to their speed, so norms are only comparable for equal work: after h inner steps a norm grows between
    sqrt(h) (noise) and h (drift). The expected norm goes with sqrt(tokens), and the band is widened by the same factor
    on the side where drift would lead: an honest peer with a tenth of the median's tokens passes either way.

    `norm_clip`: an update longer than this many times the expected norm is shortened to it. 1 would be the plain
    clip to the median, which shortens half of all honest updates a little every round; 1.5 leaves ordinary
    spread alone, so that a peaceful round is DiLoCo's token-weighted mean exactly, and an attacker gains at most half.

    `band_from`: with fewer contributors there is no telling which one is odd: they are clipped, never left out.
    The median is the lower one of two: of two that differ wildly, the longer is clipped.
    """

    token_cap: float = 3.0
    norm_band: float = 3.0
    norm_clip: float = 1.5
    band_from: int = 3


@dataclass(frozen=True)
class Share:
    """One contributor's share. `weight`: what its decoded update is multiplied by, or 0 and the `reason`."""

    weight: float
    reason: Reason = ""


OPEN_GATE: Final = NormGate(token_cap=math.inf, norm_band=math.inf, norm_clip=math.inf)  # a plain weighted mean


def judge(tokens: Sequence[int], norms: Sequence[float], gate: NormGate | None = None) -> tuple[Share, ...]:
    """Each contributor's share of the merge, in the order given.

    `tokens`: work done; `norms`: L2 norm of the whole decoded update. Token weights are normalised over those that pass
    and then multiplied by the clip factor, so they sum to 1, or to less where something was clipped. If nobody passes,
    all weights are 0. Permuting the contributors permutes the result, bit for bit.
    """
    gate = gate or NormGate()
    if len(tokens) != len(norms):
        raise ValueError(f"{len(tokens)} token counts for {len(norms)} norms")
    reasons: list[Reason] = [_plain_reason(t, n) for t, n in zip(tokens, norms, strict=True)]
    working = [i for i, reason in enumerate(reasons) if not reason]
    if not working:
        return tuple(Share(0.0, reason) for reason in reasons)

    usual = median_low([tokens[i] for i in working])
    counted = {i: min(float(tokens[i]), gate.token_cap * usual) for i in working}
    root = {i: math.sqrt(counted[i] / usual) for i in working}
    pace = median_low([norms[i] / root[i] for i in working])  # the norm of the median contributor's work
    crowd = len(working) >= gate.band_from
    moved = pace > 0 or any(norms[i] > 0 for i in working)
    for i in working:
        reasons[i] = _norm_reason(norms[i], pace, tokens[i] / usual, gate, crowd) if moved else ""
    passed = [i for i in working if not reasons[i]]
    total = math.fsum(counted[i] for i in passed)
    shares = [Share(0.0, reason) for reason in reasons]
    for i in passed:
        bound = gate.norm_clip * pace * root[i]
        clip = bound / norms[i] if norms[i] > bound > 0 else 1.0
        weight = counted[i] / total * clip
        shares[i] = Share(weight, "" if weight > 0 else "norm_high")  # so much longer that the clip rounds to nothing
    return tuple(shares)


def contribution_weights(
    tokens: Sequence[int], norms: Sequence[float], gate: NormGate | None = None
) -> tuple[float, ...]:
    """The weights of `judge`: what each decoded update is multiplied by; 0 for one that is left out."""
    return tuple(share.weight for share in judge(tokens, norms, gate))


def gradient_weights(tokens: Sequence[int], norms: Sequence[float], gate: NormGate | None = None) -> tuple[float, ...]:
    """`contribution_weights` of mean gradients, whose norms FALL with work: from 1 (one direction) to 1 / sqrt(tokens)
    (noise). The gate expects what sums of them do, norms that grow between sqrt(tokens) and tokens."""
    return contribution_weights(tokens, [work * norm for work, norm in zip(tokens, norms, strict=True)], gate)


def _plain_reason(tokens: int, norm: float) -> Reason:
    if not (math.isfinite(norm) and norm >= 0):
        return "not_finite"
    return "" if tokens > 0 else "no_tokens"


def _norm_reason(norm: float, pace: float, work: float, gate: NormGate, crowd: bool) -> Reason:
    """`work`: its tokens over the median's. Uncapped: the clip is what bounds its pull."""
    if math.isinf(gate.norm_band):
        return ""
    if norm == 0:
        return "norm_low"  # somebody moved, and this one not at all: it would only dilute
    if not crowd:
        return ""
    if norm * gate.norm_band < pace * min(math.sqrt(work), work):
        return "norm_low"
    return "norm_high" if norm > gate.norm_band * pace * max(1.0, work) else ""


def merge_part(
    codec: Codec, encoded: Sequence[Buffer], weights: Sequence[float], numel: int, out_codec: Codec
) -> torch.Tensor:
    """Sum of weight * decoded over the contributors, in the order given, encoded once: uint8, shape
    (out_codec.encoded_size(numel),).

    fp32, one rounding an operation, so anybody who repeats the merge gets the same bits; the relative error against
    float64 is about 6e-8 times the square root of the number of contributors. Goes through the slice a chunk at a time.
    `ProtocolViolation` if a contribution does not decode.
    """
    if len(encoded) != len(weights) or not encoded:
        raise ValueError(f"{len(encoded)} contributions with {len(weights)} weights cannot be merged")
    views = [_Cut(codec, data, numel) for data in encoded]
    step = CHUNK if CHUNK % codec.granule == 0 and CHUNK % out_codec.granule == 0 else max(numel, 1)
    total, work = torch.empty(min(step, numel)), torch.empty(min(step, numel))
    out = torch.empty(out_codec.encoded_size(numel), dtype=torch.uint8)
    for first in range(0, numel, step):
        last = min(first + step, numel)
        part, scratch = total[: last - first], work[: last - first]
        for index, (view, weight) in enumerate(zip(views, weights, strict=True)):
            _fold(part, scratch, codec, view.bytes(first, last), weight, index == 0)
        out_codec.encode(part, out[out_codec.encoded_size(first) :][: out_codec.encoded_size(last - first)])
    return out


class _Cut:
    """One encoded slice, from which the bytes of a chunk of values can be taken."""

    def __init__(self, codec: Codec, data: Buffer, numel: int) -> None:
        self._codec = codec
        self._data = as_bytes(data, codec.encoded_size(numel))

    def bytes(self, first: int, last: int) -> torch.Tensor:
        begin = self._codec.encoded_size(first)
        return self._data[begin : begin + self._codec.encoded_size(last - first)]


def _fold(
    total: torch.Tensor, work: torch.Tensor, codec: Codec, data: torch.Tensor, weight: float, fresh: bool
) -> None:
    """total <- weight * decoded if `fresh`, else total + weight * decoded. Two roundings, never one fused."""
    if fresh:
        codec.decode(data, total.numel(), total)
        total.mul_(weight)
    else:
        total.add_(codec.decode(data, total.numel(), work).mul_(weight))
