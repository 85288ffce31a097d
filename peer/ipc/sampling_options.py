"""How the tokens of a session are chosen: what a client asks for, and `peer.inference.sampling` does.

Imports no torch and no numpy.
"""

from __future__ import annotations

import secrets
from typing import Annotated, Final

import msgspec

from peer.config import check_range

SEED_MAX: Final = (1 << 64) - 1
LIKELIEST_MAX: Final = 20
"""The most tokens that are reported with their log-probabilities."""
_SEED_BITS: Final = 53  # so that JSON readers that hold numbers as floats get it right


class Sampling(msgspec.Struct, frozen=True, array_like=True):
    """How tokens are chosen."""

    temperature: Annotated[float, msgspec.Meta(ge=0, le=1e4)] = 0.0
    """0: the likeliest token."""
    top_k: Annotated[int, msgspec.Meta(ge=0, le=1 << 24)] = 0
    """Only the k likeliest tokens; 0 for all."""
    top_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 1.0
    """Only the likeliest tokens that together have this probability (1904.09751)."""
    min_p: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0
    """Only tokens with this share of the likeliest one's probability (2407.01082)."""
    repetition_penalty: Annotated[float, msgspec.Meta(ge=1e-3, le=1e3)] = 1.0
    """Logits of tokens seen before are divided by this where positive, multiplied where not (1909.05858)."""
    seed: Annotated[int, msgspec.Meta(ge=0)] = 0  # msgspec reads no number of more than 64 bits
    logprobs: Annotated[int, msgspec.Meta(ge=0, le=LIKELIEST_MAX)] = 0
    """How many of the likeliest tokens are reported with their log-probabilities."""

    def __post_init__(self) -> None:
        """Check what a caller gives, as its types check what another peer sends."""
        check_range(self, 0.0, 1e4, "temperature")
        check_range(self, 0, 1 << 24, "top_k")
        check_range(self, 0.0, 1.0, "top_p", "min_p")
        check_range(self, 1e-3, 1e3, "repetition_penalty")
        check_range(self, 0, SEED_MAX, "seed")
        check_range(self, 0, LIKELIEST_MAX, "logprobs")


def new_seed() -> int:
    """Return a seed by chance, for sampling that need not be repeated."""
    return secrets.randbits(_SEED_BITS)
