"""The interface of merge rules: what an owner makes of the contributions to its slice.

A rule has two parts. The gate's part, `weights`, is computed by all members from committed tokens and norms. The
owner's part, `merge`, needs the values. Both are pure and have the same bits on every CPU, so any other peer that has
the contributions can repeat them. Contributions come in a canonical order, which does not depend on the senders.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from optim.codecs import Buffer, Codec
from optim.merge import contribution_weights, merge_part


class MergeRule(ABC):
    """One way to merge n contributions to a slice of `numel` values."""

    def weights(self, tokens: Sequence[int], norms: Sequence[float]) -> tuple[float, ...]:
        """Return each contributor's weight, 0 if it is left out; together at most 1. `tokens`: its work; `norms`: L2
        norm of its whole message."""
        return contribution_weights(tokens, norms)

    @abstractmethod
    def merge(
        self, codec: Codec, encoded: Sequence[Buffer], weights: Sequence[float], numel: int, out_codec: Codec
    ) -> torch.Tensor:
        """Return the merged slice, encoded once: uint8, shape (out_codec.encoded_size(numel),). `ProtocolViolation` if
        a contribution does not decode, or the result does not fit the codec."""

    @abstractmethod
    def norm_bound(self, weights: Sequence[float], sqnorms: Sequence[float]) -> float:
        """Return the largest L2 norm that a merge of contributions of these squared norms can have."""


class MeanRule(MergeRule):
    """The mean, weighted by tokens, with too long updates shortened."""

    def merge(
        self, codec: Codec, encoded: Sequence[Buffer], weights: Sequence[float], numel: int, out_codec: Codec
    ) -> torch.Tensor:
        return merge_part(codec, encoded, weights, numel, out_codec)

    def norm_bound(self, weights: Sequence[float], sqnorms: Sequence[float]) -> float:
        return float(sum(weight * sqnorm**0.5 for weight, sqnorm in zip(weights, sqnorms, strict=True)))
