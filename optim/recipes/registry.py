"""From a manifest's words to the recipe that carries them out."""

from __future__ import annotations

from collections.abc import Sequence

from optim import config
from optim.codecs import get_codec
from optim.large_batch import LargeBatchStep
from optim.methods.demo import DemoScheme
from optim.methods.diloco import fragment_spans, strided_fragments
from optim.methods.lion import LionRule
from optim.methods.sparseloco import SparseLocoScheme
from optim.outer import DilocoOuter
from optim.recipes.allocated import AllocatedWire
from optim.recipes.allreduce import AllReduceRecipe
from optim.recipes.dense import DenseWire, Wire
from optim.recipes.diloco import DilocoRecipe
from optim.recipes.interface import Recipe
from optim.recipes.lion import LionRecipe
from optim.recipes.low_rank import LowRankWire
from optim.recipes.sparse import DemoRecipe, SparseLocoRecipe
from peer.config import InnerConfig
from peer.errors import ConfigError
from peer.layout import FlatLayout


def build_recipe(
    method: config.OuterConfig, codec: config.CodecConfig, layout: FlatLayout, inner: InnerConfig
) -> Recipe:
    """A peer's own copy of the run's method, with fresh private state. `ConfigError` if the codec does not go with it.
    Not for gossip, which has no common rounds."""
    if not isinstance(method, config.DENSE) and codec != config.CodecConfig():
        raise ConfigError("demo, sparseloco and lion pack their own messages: leave the codec section out.")
    match method:
        case config.Diloco() | config.Eager():
            return DilocoRecipe(build_wire(codec, layout, [list(layout.slots)]), _outer(method))
        case config.Streaming():
            fragments = strided_fragments(list(layout.slots), method.fragments)
            return DilocoRecipe(build_wire(codec, layout, fragments), _outer(method))
        case config.AllReduce():
            rule = LargeBatchStep(
                method.optimizer, inner.betas, inner.eps, inner.weight_decay, inner.clip_norm, matrices_only=True
            )
            return AllReduceRecipe(layout, build_wire(codec, layout, [list(layout.slots)]), rule)
        case config.Demo():
            return DemoRecipe(layout, DemoScheme(method.decay, method.topk, inner.weight_decay), method.chunk)
        case config.SparseLoco():
            scheme = SparseLocoScheme(method.topk, method.bins or None, method.lr, method.ef_decay, method.clip_norm)
            return SparseLocoRecipe(layout, scheme, method.chunk)
        case config.Lion():
            rule_of_votes = LionRule(method.b1, method.b2, inner.weight_decay)
            return LionRecipe(layout.numel, rule_of_votes, majority=method.vote == "majority")
        case _:
            raise ValueError("gossip has an engine of its own")


def shared_vectors(
    method: config.OuterConfig, codec: config.CodecConfig, layout: FlatLayout, inner: InnerConfig
) -> tuple[str, ...]:
    """What a joiner takes over besides theta: the recipe's `shared`; nothing in gossip, where momentum is a peer's own.
    `ConfigError` if the codec does not go with the method."""
    if not isinstance(method, config.Gossip):
        return build_recipe(method, codec, layout, inner).shared
    get_codec(codec.down)
    if codec.up in ("powersgd", "lgreco"):
        raise ConfigError(f"gossip does not go with the codec {codec.up}: choose one that codes every value by itself.")
    return ()


def build_wire(codec: config.CodecConfig, layout: FlatLayout, fragments: Sequence[Sequence[str]]) -> Wire:
    """How vectors cross of which one fragment, the names of its parameters, is exchanged at a time."""
    if codec.up == "powersgd":
        in_order = [[name for name in layout.slots if name in fragment] for fragment in fragments]
        return LowRankWire(layout, in_order, codec.rank)
    places, down = [fragment_spans(layout, fragment) for fragment in fragments], get_codec(codec.down)
    if codec.up == "lgreco":
        return AllocatedWire(places, down, codec.error_budget)
    return DenseWire(places, get_codec(codec.up), down)


def _outer(method: config.Diloco | config.Streaming | config.Eager) -> DilocoOuter:
    return DilocoOuter(method.lr, method.momentum, method.nesterov)
