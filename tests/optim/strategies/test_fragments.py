"""Streaming's fragments on the network."""

from __future__ import annotations

from itertools import pairwise

import pytest

from optim.strategies.registry import even_fragments
from peer.config import ModelConfig
from peer.errors import ConfigError
from peer.model.layout import FlatLayout

LAYOUT = FlatLayout.of(
    ModelConfig(
        vocab_size=5000, hidden_size=64, layers=12, heads=4, kv_heads=2, intermediate_size=176, max_seq_len=64,
        tie_embeddings=False,
    )
)  # fmt: skip


@pytest.mark.parametrize("count", [2, 3, 4, 6, 12])
def test_fragments_tile_the_vector_and_are_of_one_size(count: int) -> None:
    fragments = even_fragments(LAYOUT, count)
    spans = sorted((span.start, span.stop) for fragment in fragments for span in fragment)
    assert [first for first, _ in spans] == [0, *(last for _, last in spans)][: len(spans)]
    assert spans[-1][1] == LAYOUT.numel
    sizes = [sum(span.stop - span.start for span in fragment) for fragment in fragments]
    assert len(sizes) == count and max(sizes) < 1.01 * LAYOUT.numel / count
    for fragment in fragments:
        assert all(a.stop <= b.start for a, b in pairwise(fragment))


def test_blocks_are_whole_and_strided() -> None:
    slot = LAYOUT.slots["model.layers.5.mlp.up_proj.weight"]
    holders = [
        i for i, fragment in enumerate(even_fragments(LAYOUT, 4))
        if any(s.start <= slot.offset and slot.offset + slot.numel <= s.stop for s in fragment)
    ]  # fmt: skip
    assert holders == [5 % 4]


def test_more_fragments_than_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match="choose 12 or fewer"):
        even_fragments(LAYOUT, 13)
