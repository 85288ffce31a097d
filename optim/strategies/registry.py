"""Builds a strategy from the manifest's method and codec sections."""

from __future__ import annotations

from itertools import pairwise

from optim import config
from optim.algorithms.demo import DemoScheme
from optim.algorithms.fragments import fragment_spans, strided_fragments
from optim.algorithms.large_batch import LargeBatchStep
from optim.algorithms.lion import LionRule
from optim.algorithms.outer_step import DilocoOuter
from optim.algorithms.sparseloco import SparseLocoScheme
from optim.codecs import get_codec
from optim.rules.interface import MergeRule
from optim.rules.registry import MEAN, build_rule
from optim.strategies.allocated import AllocatedFormat
from optim.strategies.allreduce import AllReduceStrategy
from optim.strategies.dense import DenseFormat, MessageFormat
from optim.strategies.diloco import DilocoStrategy
from optim.strategies.interface import NewVector, OuterStrategy, in_memory
from optim.strategies.lion import LionStrategy
from optim.strategies.low_rank import LowRankFormat
from optim.strategies.sparse import DemoStrategy, SparseLocoStrategy
from peer.config import InnerConfig
from peer.errors import ConfigError
from peer.model.layout import FlatLayout


def build_strategy(
    method: config.OuterConfig,
    codec: config.CodecConfig,
    layout: FlatLayout,
    inner: InnerConfig,
    new_vector: NewVector = in_memory,
) -> OuterStrategy:
    """Return a peer's own strategy, with new private state, which `new_vector` makes when it is first needed.
    `ConfigError` if the codec does not fit the method.

    Gossip has no common rounds and therefore no strategy."""
    if not isinstance(method, config.DENSE) and codec != config.CodecConfig():
        raise ConfigError("demo, sparseloco and lion pack their own messages: leave the codec section out")
    try:
        config.check_merge(method, codec)
    except ValueError as error:
        raise ConfigError(str(error)) from error
    merge = build_rule(method)
    match method:
        case config.DilocoConfig():
            strategy = DilocoStrategy(build_format(codec, layout, 1, merge, new_vector), _outer(method))
            strategy.check_by_loss = method.check_by_loss
            return strategy
        case config.EagerConfig():
            return DilocoStrategy(build_format(codec, layout, 1, merge, new_vector), _outer(method))
        case config.StreamingConfig():
            return DilocoStrategy(build_format(codec, layout, method.fragments, merge, new_vector), _outer(method))
        case config.AllReduceConfig():
            rule = LargeBatchStep(
                method.optimizer, inner.betas, inner.eps, inner.weight_decay, inner.clip_norm, matrices_only=True
            )
            return AllReduceStrategy(layout, build_format(codec, layout, 1, MEAN, new_vector), rule)
        case config.DemoConfig():
            demo = DemoScheme(method.decay, method.topk, inner.weight_decay)
            return DemoStrategy(layout, demo, method.chunk, new_vector)
        case config.SparseLocoConfig():
            scheme = SparseLocoScheme(method.topk, method.bins or None, method.lr, method.ef_decay, method.clip_norm)
            return SparseLocoStrategy(layout, scheme, method.chunk, new_vector)
        case config.LionConfig():
            rule_of_votes = LionRule(method.b1, method.b2, inner.weight_decay)
            return LionStrategy(layout.numel, rule_of_votes, method.vote == "majority", new_vector)
        case _:
            raise ValueError("gossip has an engine of its own: build no strategy for it")


def shared_vectors(
    method: config.OuterConfig, codec: config.CodecConfig, layout: FlatLayout, inner: InnerConfig
) -> tuple[str, ...]:
    """Return the names of the vectors that a joiner fetches besides theta: the strategy's `shared`. None in gossip,
    where momentum is a peer's own. `ConfigError` if the codec does not fit the method."""
    if not isinstance(method, config.GossipConfig):
        return build_strategy(method, codec, layout, inner).shared
    get_codec(codec.down)
    if codec.down == "two_bit":
        raise ConfigError("gossip sends whole weights down, which two bits would destroy: set [codec] down to int8")
    if codec.up in ("powersgd", "lgreco"):
        raise ConfigError(f"gossip cannot use the codec {codec.up}: choose one that codes every value separately")
    return ()


def build_format(
    codec: config.CodecConfig,
    layout: FlatLayout,
    fragments: int,
    rule: MergeRule = MEAN,
    new_vector: NewVector = in_memory,
) -> MessageFormat:
    """Return the form of dense messages, of one fragment at a time. A `rule` other than the mean has a codec that
    `check_merge` allows."""
    down = get_codec(codec.down)
    if codec.up == "powersgd":  # matrices stay whole
        names = strided_fragments(list(layout.slots), fragments) if fragments > 1 else [list(layout.slots)]
        ordered = [[name for name in layout.slots if name in fragment] for fragment in names]
        return LowRankFormat(layout, ordered, codec.rank, down, new_vector)
    places = even_fragments(layout, fragments)
    if codec.up == "lgreco":
        return AllocatedFormat(layout, places, down, codec.bits, new_vector)
    return DenseFormat(places, get_codec(codec.up), down, rule, new_vector)


def even_fragments(layout: FlatLayout, count: int) -> list[list[slice]]:
    """Return the spans of each fragment: whole blocks, strided (2501.18512), and an equal share of the rows of each
    other parameter (embedding, head).

    An embedding may be a third of the model. In one fragment it would keep the peak of bandwidth high, which fragments
    should lower."""
    if count == 1:
        return [[slice(0, layout.numel)]]
    blocks = [name for name in layout.slots if any(part.isdigit() for part in name.split("."))]
    fragments = [fragment_spans(layout, names) for names in strided_fragments(blocks, count)]
    for name, slot in layout.slots.items():
        if name in blocks:
            continue
        rows, width = slot.shape[0], slot.numel // slot.shape[0]
        cuts = [slot.offset + width * (rows * i // count) for i in range(count + 1)]
        for fragment, (first, last) in zip(fragments, pairwise(cuts), strict=True):
            if first < last:
                fragment.append(slice(first, last))
    return [sorted(fragment, key=lambda span: int(span.start)) for fragment in fragments]


def _outer(method: config.OuterStepConfig) -> DilocoOuter:
    return DilocoOuter(method.lr, method.momentum, method.nesterov)
