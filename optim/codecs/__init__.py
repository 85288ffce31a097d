"""Codecs: how fp32 values cross the wire. `get_codec(name)`."""

from __future__ import annotations

from optim.codecs.blockwise import Int4, Int8
from optim.codecs.floats import Fp16, Fp32
from optim.codecs.interface import Codec
from peer.errors import ConfigError

__all__ = ["CODECS", "Codec", "get_codec"]

CODECS: dict[str, Codec] = {codec.name: codec for codec in (Fp32(), Fp16(), Int8(), Int4())}


def get_codec(name: str) -> Codec:
    """The codec of that name; ConfigError lists the names there are."""
    try:
        return CODECS[name]
    except KeyError:
        raise ConfigError(f"there is no codec {name!r}: choose one of {', '.join(CODECS)}.") from None
