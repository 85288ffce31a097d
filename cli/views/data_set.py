"""What a view shows of a run's data set: its size, how far the run is in it, and who keeps and misses pages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from peer.figures import NOTHING, several, size_text

if TYPE_CHECKING:
    from cli.progress.live_peer import LivePeer
    from swarm.status.data_set import DataSetState


def progress_text(data_set: DataSetState) -> str:
    """Return how far the run is in its data set."""
    return (
        f"data set {data_set.root[:16]}: {epochs_text(data_set.epochs)},"
        f" {data_set.tokens_left / 1e6:,.1f} M of {data_set.tokens / 1e6:,.1f} M tokens left in this one"
    )


def epochs_text(epochs: float) -> str:
    """Return the number of the epoch that a run is in, and how much of it is done."""
    return f"epoch {int(epochs) + 1}, {epochs % 1:.1%} done"


def holders_text(data_set: DataSetState) -> str:
    """Return who keeps pages, as all peers say, and how long these waited for some."""
    of = several(data_set.ranges, "range")
    kept = f"{data_set.rare} of {of} of pages {'has' if data_set.rare == 1 else 'have'} fewer than two holders"
    if not data_set.rare:
        kept = f"each of the {of} of pages has two holders or more"
    waited = f"; peers waited {data_set.waited_s:.1f} s for pages in ten minutes" if data_set.waited_s else ""
    return f"{kept}{waited}"


def pages_cell(data_set: DataSetState | None, peer: str) -> str:
    """Return how many pages a peer keeps, of all."""
    member = None if data_set is None else data_set.members.get(peer)
    return NOTHING if data_set is None or member is None else f"{member.kept}/{data_set.pages}"


def own_parts(peer: LivePeer) -> list[str]:
    """Return what this machine's own peer knows of the data set; nothing without one."""
    opened, kept = peer.data_set, peer.pages_kept
    if opened is None:
        return []
    parts = [opened.root[:16], f"{opened.tokens:,} tokens"]
    if kept is not None:
        parts.append(f"{kept.pages} of {several(opened.pages, 'page')} kept")
    parts.append("all pages here" if opened.folder else f"cache {size_text(opened.cache_bytes)}")
    return [*parts, f"waited {peer.waited_s:.1f} s for pages"] if peer.waited_s else parts
