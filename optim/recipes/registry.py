"""From a manifest's words to the recipe that carries them out."""

from __future__ import annotations

from optim import config
from optim.codecs import get_codec
from optim.methods.diloco import fragment_spans, strided_fragments
from optim.outer import DilocoOuter
from optim.recipes.diloco import DilocoRecipe
from optim.recipes.interface import Recipe
from peer.config import InnerConfig
from peer.layout import FlatLayout


def build_recipe(
    method: config.OuterConfig, codec: config.CodecConfig, layout: FlatLayout, inner: InnerConfig
) -> Recipe:
    """A peer's own copy of the run's method, with fresh private state."""
    up, down = get_codec(codec.up), get_codec(codec.down)
    if isinstance(method, config.Streaming):
        fragments = strided_fragments(list(layout.slots), method.fragments)
        spans = [fragment_spans(layout, fragment) for fragment in fragments]
        return DilocoRecipe(spans, up, down, DilocoOuter(method.lr, method.momentum, method.nesterov))
    assert isinstance(method, config.Diloco | config.Eager)
    outer = DilocoOuter(method.lr, method.momentum, method.nesterov)
    return DilocoRecipe([[slice(0, layout.numel)]], up, down, outer)
