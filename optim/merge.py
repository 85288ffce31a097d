"""Merging: the gate, which weighs contributors, and the owner's weighted sum.

The gate needs only each contributor's token count and the norm of its whole update. Both are committed to before the
merge, so every peer computes the same weights, in float64 and independent of the contributors' order.
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
from optim.kernels import kernels_for
from peer.buffers import allocate

CHUNK: Final = 64 * ROW  # values; the sum and one decoded contribution stay in the L2 cache
Reason = Literal["", "no_tokens", "not_finite", "norm_low", "norm_high"]


@dataclass(frozen=True)
class NormGate:
    """The rules of admission to a merge. Every claimed norm and token count is bounded."""

    token_cap: float = 3.0
    """A contributor counts for at most this many times the median's tokens."""
    norm_band: float = 3.0
    """An update whose norm differs from the expected norm by more than this factor is left out.

    Norms are comparable only for equal work: after h inner steps a norm has grown between sqrt(h) (noise) and h
    (drift). The expected norm is proportional to sqrt(tokens), and the band is wider by the same factor on the side of
    drift. An honest peer with a tenth of the median's tokens passes in both cases."""
    norm_clip: float = 1.5
    """An update longer than this many times the expected norm is shortened to that bound. 1 would shorten half of all
    honest updates a little; 1.5 leaves ordinary spread alone, so that a round without attackers is DiLoCo's
    token-weighted mean, and an attacker gains at most half."""
    band_from: int = 3
    """With fewer contributors it is unknown which one is wrong: they are clipped, never left out. The median is the
    lower of two, so of two that differ much the longer is clipped."""


@dataclass(frozen=True)
class Share:
    """One contributor's share: the factor of its decoded update, or 0 with the `reason`."""

    weight: float
    reason: Reason = ""
    clip: float = 0.0
    """The factor that shortens a too long update, at most 1; part of `weight`."""


OPEN_GATE: Final = NormGate(token_cap=math.inf, norm_band=math.inf, norm_clip=math.inf)  # a plain weighted mean


def judge(tokens: Sequence[int], norms: Sequence[float], gate: NormGate | None = None) -> tuple[Share, ...]:
    """Return each contributor's share of the merge, in the order given.

    `tokens`: work done; `norms`: L2 norm of the whole decoded update. Token weights are normalised over the
    contributors that pass, then multiplied by the clip factor: they sum to 1, or to less after a clip. If no
    contributor passes, all weights are 0. Permuting the contributors permutes the result, bit for bit.
    """
    gate = gate or NormGate()
    if len(tokens) != len(norms):
        raise ValueError(f"{len(tokens)} token counts for {len(norms)} norms: pass one of each a contributor")
    reasons: list[Reason] = [_plain_reason(t, n) for t, n in zip(tokens, norms, strict=True)]
    working = [i for i, reason in enumerate(reasons) if not reason]
    if not working:
        return tuple(Share(0.0, reason) for reason in reasons)

    usual = median_low([tokens[i] for i in working])
    counted = {i: min(float(tokens[i]), gate.token_cap * usual) for i in working}
    root = {i: math.sqrt(counted[i] / usual) for i in working}
    typical = median_low([norms[i] / root[i] for i in working])  # the norm of the median contributor's work
    enough = len(working) >= gate.band_from
    moved = typical > 0 or any(norms[i] > 0 for i in working)
    for i in working:
        reasons[i] = _norm_reason(norms[i], typical, tokens[i] / usual, gate, enough) if moved else ""
    passed = [i for i in working if not reasons[i]]
    total = math.fsum(counted[i] for i in passed)
    shares = [Share(0.0, reason) for reason in reasons]
    for i in passed:
        bound = gate.norm_clip * typical * root[i]
        clip = bound / norms[i] if norms[i] > bound > 0 else 1.0
        weight = counted[i] / total * clip
        # a weight of 0 that passed: so long that the clip factor rounds to 0
        shares[i] = Share(weight, "", clip) if weight > 0 else Share(0.0, "norm_high")
    return tuple(shares)


def contribution_weights(
    tokens: Sequence[int], norms: Sequence[float], gate: NormGate | None = None
) -> tuple[float, ...]:
    """Return the weights of `judge`: the factor of each decoded update, 0 for one that is left out."""
    return tuple(share.weight for share in judge(tokens, norms, gate))


def gradient_weights(tokens: Sequence[int], norms: Sequence[float], gate: NormGate | None = None) -> tuple[float, ...]:
    """Return `contribution_weights` of mean gradients. Their norms FALL with work, from 1 (one direction) to
    1 / sqrt(tokens) (noise); the gate expects norms of sums, which grow between sqrt(tokens) and tokens."""
    return contribution_weights(tokens, [work * norm for work, norm in zip(tokens, norms, strict=True)], gate)


def equal_weights(tokens: Sequence[int], norms: Sequence[float], gate: NormGate | None = None) -> tuple[float, ...]:
    """Return weights of those that `judge` lets pass, each the same but for the clip factor: together at most 1."""
    shares = judge(tokens, norms, gate)
    merged = sum(share.weight > 0 for share in shares)
    return tuple(share.clip / merged if share.weight > 0 else 0.0 for share in shares)


def _plain_reason(tokens: int, norm: float) -> Reason:
    if not (math.isfinite(norm) and norm >= 0):
        return "not_finite"
    return "" if tokens > 0 else "no_tokens"


def _norm_reason(norm: float, typical: float, work: float, gate: NormGate, enough: bool) -> Reason:
    """Judge one norm. `work`: the contributor's tokens over the median's, not capped: the clip bounds its influence."""
    if math.isinf(gate.norm_band):
        return ""
    if norm == 0:
        return "norm_low"  # others moved and this one did not: it would only dilute
    if not enough:
        return ""
    if norm * gate.norm_band < typical * min(math.sqrt(work), work):
        return "norm_low"
    return "norm_high" if norm > gate.norm_band * typical * max(1.0, work) else ""


def merge_part(
    codec: Codec, encoded: Sequence[Buffer], weights: Sequence[float], numel: int, out_codec: Codec
) -> torch.Tensor:
    """Return the sum of weight * decoded over the contributors, in the order given, encoded once: uint8, shape
    (out_codec.encoded_size(numel),).

    The sum is in fp32 with one rounding an operation, so every peer that repeats the merge gets the same bits. Its
    relative error against float64 is about 6e-8 times the square root of the number of contributors.
    `ProtocolViolation` if a contribution does not decode.
    """
    views = encoded_slices(codec, encoded, weights, numel)
    out = torch.frombuffer(allocate(max(1, out_codec.encoded_size(numel))), dtype=torch.uint8)
    out = out[: out_codec.encoded_size(numel)]
    if codec.name == out_codec.name:
        whole = [view.bytes(0, numel) for view in views]
        kernels = kernels_for(codec.name, out, *whole)
        if kernels is not None and kernels.merge(whole, weights, numel, out):
            return out
    step = CHUNK if CHUNK % codec.granule == 0 and CHUNK % out_codec.granule == 0 else max(numel, 1)
    total, work = (torch.empty(min(step, numel), dtype=torch.float32) for _ in range(2))
    for first in range(0, numel, step):
        last = min(first + step, numel)
        part, scratch = total[: last - first], work[: last - first]
        for index, (view, weight) in enumerate(zip(views, weights, strict=True)):
            if index == 0:
                view.decode(first, last, part).mul_(weight)
            else:  # two roundings, never fused
                part.add_(view.decode(first, last, scratch).mul_(weight))
        out_codec.encode(part, out[out_codec.encoded_size(first) :][: out_codec.encoded_size(last - first)])
    return out


class EncodedSlice:
    """One encoded slice, from which a chunk of values can be taken."""

    def __init__(self, codec: Codec, data: Buffer, numel: int) -> None:
        self._codec = codec
        self._data = as_bytes(data, codec.encoded_size(numel))

    def bytes(self, first: int, last: int) -> torch.Tensor:
        begin = self._codec.encoded_size(first)
        return self._data[begin : begin + self._codec.encoded_size(last - first)]

    def decode(self, first: int, last: int, out: torch.Tensor) -> torch.Tensor:
        """Decode the values [first, last), cut at the codec's granules, into `out` (last - first,) fp32."""
        return self._codec.decode(self.bytes(first, last), last - first, out)


def encoded_slices(codec: Codec, encoded: Sequence[Buffer], weights: Sequence[float], numel: int) -> list[EncodedSlice]:
    """Return the contributions to one slice; `ProtocolViolation` if one has the wrong length."""
    if len(encoded) != len(weights) or not encoded:
        raise ValueError(
            f"{len(encoded)} contributions with {len(weights)} weights cannot be merged: pass one weight each"
        )
    return [EncodedSlice(codec, data, numel) for data in encoded]
