"""Codecs: the forms of fp32 vectors on the wire. One file a family; `get_codec` finds a codec by its name."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from optim.codecs.bits import Sign, Ternary
from optim.codecs.blockwise import Int4, Int8
from optim.codecs.codebook import SixSigma
from optim.codecs.floats import Bf16, Fp16, Fp32
from optim.codecs.interface import ROW, Buffer, Codec
from optim.codecs.tables import Fp4, Nf4
from optim.codecs.topk import TopK
from optim.codecs.two_bit import TwoBit
from peer.errors import ConfigError

__all__ = ["CODECS", "ROW", "Buffer", "Codec", "get_codec"]

_ALL: Final[tuple[Codec, ...]] = (
    *(Fp32(), Fp16(), Bf16(), Int8(), SixSigma()),
    *(Int4(), Nf4(), Fp4(), TwoBit(), Ternary(), Sign(), TopK()),
)
CODECS: Final[Mapping[str, Codec]] = MappingProxyType({codec.name: codec for codec in _ALL})


def get_codec(name: str) -> Codec:
    """Return the codec of that name; `ConfigError` lists the names."""
    try:
        return CODECS[name]
    except KeyError:
        raise ConfigError(f"there is no codec {name!r}: choose one of {', '.join(CODECS)}") from None
