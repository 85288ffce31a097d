"""Sizes that the methods and codecs of a manifest send and keep, by arithmetic and without torch. Tests hold it to the
messages themselves."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from optim import config
from peer.footprint.parameters import Shape
from peer.footprint.workload import ExchangeSize, Product

BITS: Final[dict[str, float]] = {
    "fp32": 32, "fp16": 16, "bf16": 16, "int8": 8 + 32 / 4096, "int8_6sigma": 8.125, "int4": 4.125, "nf4": 4.25,
    "fp4_e3m0": 4.125, "two_bit": 2.125, "ternary": 1.605, "sign": 1 + 16 / 4096, "topk": 0.4375,
}  # fmt: skip
"""A value's, of long vectors."""
SLICE_VALUES_MAX: Final = 1 << 21  # 2 MiB at 8 bits: small enough to overlap send and merge, with few calls
SLICE_VALUES_MIN: Final = 1 << 14
SLICES_WANTED: Final = 12  # a smaller model has smaller slices; 2, 3, 4 or 6 peers share that many evenly
_FEEDBACK: Final = ("two_bit", "sign", "topk", "lgreco")
_VOTE_BITS: Final = 1 + 1 / 64  # a sign, and a bit a block without votes
_MAJORITY_BITS: Final = 1.6  # five decisions a byte


def exchange_of(
    method: config.OuterConfig, codec: config.CodecConfig, shapes: Iterable[tuple[str, Shape]], peers: int
) -> ExchangeSize:
    """Return what a run with that method exchanges among this many peers; `shapes` are those of the parameters."""
    match method:
        case config.DemoConfig():
            return _gathered(_tile_bits(shapes, method.chunk, method.topk, 32), peers, "gradient")
        case config.SparseLocoConfig():
            bits = math.log2(method.bins) if method.bins else 32
            return _gathered(_tile_bits(shapes, method.chunk, method.topk, bits), peers, "delta")
        case config.LionConfig():
            down = _MAJORITY_BITS if method.vote == "majority" else math.ceil(math.log2(2 * peers + 1))
            return ExchangeSize(
                state_vectors=1,
                up=_VOTE_BITS / 8,
                result=down / 8,
                peers=peers,
                private_vectors=1,
                memory_vectors=1,
                product="gradient",
            )
        case config.GossipConfig():  # to one partner: weights and delta
            both = BITS[codec.up] / 8, BITS[codec.down] / 8
            return ExchangeSize(state_vectors=2, up=both[0], result=both[1], peers=peers, is_common=False)
    return _dense(method, codec, shapes, peers)


def slices_of(values: float) -> int:
    """Return how many slices a message of this many values has: exactly where they are of equal length; about, where
    they are whole parameters."""
    length = min(max(math.ceil(values / SLICES_WANTED), SLICE_VALUES_MIN), SLICE_VALUES_MAX)
    return math.ceil(values / length)


def largest_divisor(size: int, at_most: int) -> int:
    """Return the largest divisor of `size` that is at most `at_most`."""
    return max(divisor for divisor in range(1, min(size, at_most) + 1) if size % divisor == 0)


def _dense(
    method: config.OuterConfig, codec: config.CodecConfig, shapes: Iterable[tuple[str, Shape]], peers: int
) -> ExchangeSize:
    if codec.up == "powersgd":
        share = _low_rank_share(shapes, codec.rank)
        up, result, memory = share * BITS["int8"] / 8, share * BITS[codec.down] / 8, 1.0
    else:  # with feedback a residual
        bits = codec.bits if codec.up == "lgreco" else BITS[codec.up]
        up, result, memory = bits / 8, BITS[codec.down] / 8, 1.0 * (codec.up in _FEEDBACK)
    private = memory
    every_step = isinstance(method, config.AllReduceConfig)
    fragments, overlap = 1, 0.0
    if isinstance(method, config.StreamingConfig):
        fragments, overlap = method.fragments, float(method.tau)
    if isinstance(method, config.DilocoConfig) and method.check_by_loss:  # weights before a round, a fetched update
        private += 1 + up / 4
    if isinstance(method, config.EagerConfig):  # shared weights, offset, its velocity, the last delta and a fresh one
        overlap, private = math.inf, private + 5
    return ExchangeSize(
        state_vectors=3 if every_step else 2,
        up=up,
        result=result,
        peers=peers,
        private_vectors=private,
        memory_vectors=memory,
        is_merged_whole=every_step,
        product="gradient" if every_step else "delta",
        fragments=fragments,
        overlap_steps=overlap,
    )


def _gathered(bits: float, peers: int, product: Product) -> ExchangeSize:
    """Return the exchange of a method whose result has every contributor's message in it."""
    return ExchangeSize(
        state_vectors=1,
        up=bits / 8,
        result=peers * bits / 8,
        peers=peers,
        private_vectors=1,
        memory_vectors=1,
        product=product,
    )


def _tile_bits(shapes: Iterable[tuple[str, Shape]], chunk: int, topk: int, value_bits: float) -> float:
    """Return the bits a value of tiles of which `topk` values are sent, each with its index."""
    sent = values = 0.0
    for _, shape in shapes:
        elements = math.prod(largest_divisor(size, chunk) for size in shape)
        tiles = math.prod(shape) // elements
        sent += tiles * min(topk, elements) * (max(1, math.ceil(math.log2(elements))) + value_bits)
        values += math.prod(shape)
    return sent / values


def _low_rank_share(shapes: Iterable[tuple[str, Shape]], rank: int) -> float:
    """Return the numbers sent for each value, on average over two rounds: one factor each; parameters that both do not
    halve are sent whole."""
    sent = values = 0.0
    for _, shape in shapes:
        size, factors = math.prod(shape), rank * sum(shape)
        sent += factors / 2 if len(shape) > 1 and 2 * factors <= size else size
        values += size
    return sent / values
