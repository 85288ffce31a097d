"""How a model is cut into fragments, of which Streaming DiLoCo (arXiv 2501.18512) exchanges one at a time."""

from __future__ import annotations

from collections.abc import Sequence

from peer.errors import ConfigError
from peer.model.layout import FlatLayout


def strided_fragments(names: Sequence[str], count: int) -> list[list[str]]:
    """Distribute whole blocks over `count` fragments: block i goes to fragment i mod count.

    Striding is the paper's choice (2501.18512): adjacent blocks differ less than distant ones in when they are needed.
    Parameters before the blocks join the first fragment, parameters after the blocks the last.
    """
    blocks = [next((int(part) for part in name.split(".") if part.isdigit()), None) for name in names]
    numbered = [b for b in blocks if b is not None]
    if len(set(numbered)) < count:
        found = len(set(numbered))
        raise ConfigError(f"{count} fragments for {found} blocks are too many: choose {found} or fewer")
    order = {block: i for i, block in enumerate(sorted(set(numbered)))}
    first = next(i for i, block in enumerate(blocks) if block is not None)
    fragments: list[list[str]] = [[] for _ in range(count)]
    for i, (name, block) in enumerate(zip(names, blocks, strict=True)):
        fragments[order[block] % count if block is not None else (0 if i < first else count - 1)].append(name)
    return fragments


def fragment_spans(layout: FlatLayout, names: Sequence[str]) -> list[slice]:
    """Return the fragment's spans of the flat vector, adjacent ones joined."""
    spans: list[slice] = []
    for slot in sorted(layout.slots[name] for name in names):
        if spans and spans[-1].stop == slot.offset:
            spans[-1] = slice(spans[-1].start, slot.offset + slot.numel)
        else:
            spans.append(slice(slot.offset, slot.offset + slot.numel))
    return spans
