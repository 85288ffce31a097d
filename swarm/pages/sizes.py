"""The sizes of a run's data set by its manifest, its cost to a peer, and the room on a disk for its pages. No torch."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Final

import msgspec

from peer.config import DataConfig
from peer.data.pages.index import PAGE_BYTES_MAX
from peer.errors import ResourceError

CACHE_BYTES_MIN: Final = 16 * PAGE_BYTES_MAX
DISK_SHARE: Final = 0.1
"""Of what is free on a disk: what pages from other peers take of it by default."""


class DataSetSizes(msgspec.Struct, frozen=True, kw_only=True):
    """A data set, as far as its run's manifest tells."""

    root: str
    windows: int
    """To train on."""
    tokens: int
    """Of these."""
    held_out_tokens: int
    row_bytes: int
    """Of a window."""
    size_bytes: int
    """Of all pages."""
    pages: int

    @classmethod
    def of(cls, data: DataConfig) -> DataSetSizes | None:
        """Return the sizes; None for a run without a data set."""
        if (wanted := data.pages) is None:
            return None
        row_bytes = wanted.row_bytes
        a_page = PAGE_BYTES_MAX // row_bytes
        parts = (wanted.windows, wanted.held_out_windows)
        return cls(
            root=wanted.root,
            windows=wanted.windows,
            tokens=wanted.windows * (data.seq_len + 1),
            held_out_tokens=wanted.held_out_windows * (data.seq_len + 1),
            row_bytes=row_bytes,
            size_bytes=sum(parts) * row_bytes,
            pages=sum(-(-windows // a_page) for windows in parts),
        )


class DataSetPlan(msgspec.Struct, frozen=True, kw_only=True):
    """What training on a data set takes of a peer, and how often a run goes through it."""

    sizes: DataSetSizes
    epochs: float | None
    """That the run's rounds make; None for a run without end."""
    rounds_an_epoch: float
    tokens_left: int | None
    """Of the epoch that the run is in; None where its progress is not known."""
    round_bytes: float
    """About what a peer downloads in a round, until it has all pages that it keeps."""
    cache_bytes: float
    """The default limit of the pages that this machine keeps of other peers'."""


def plan_data_set(
    sizes: DataSetSizes, samples: int, trainers: int, rounds: int, home: Path, trained: int | None = None
) -> DataSetPlan:
    """Return the plan of a run of so many `trainers`, who together take `samples` a round, for a peer with that `home`.
    `rounds`: of the whole run, 0 for no end; `trained`: the windows that all have trained on, if known."""
    windows, tokens, together = sizes.windows, sizes.tokens // sizes.windows, samples * sizes.row_bytes
    return DataSetPlan(
        sizes=sizes,
        epochs=rounds * samples / windows if rounds else None,
        rounds_an_epoch=windows / samples,
        tokens_left=None if trained is None else (windows - trained % windows) * tokens,
        # A page is fetched as a whole, also where its other windows are for other peers.
        round_bytes=min(together, together / trainers + PAGE_BYTES_MAX, sizes.size_bytes),
        cache_bytes=cache_bytes(home, sizes.size_bytes),
    )


def cache_bytes(home: Path, all_bytes: int, wanted_bytes: float | None = None) -> int:
    """Return the room for pages that come from other peers: `wanted_bytes` if the user has said so, else all pages
    where these take at most a tenth of the free space under `home`, which need not exist yet, else that tenth."""
    if wanted_bytes is not None:
        return max(CACHE_BYTES_MIN, int(wanted_bytes))
    return max(CACHE_BYTES_MIN, min(all_bytes, int(DISK_SHARE * free_bytes(home))))


def free_bytes(folder: Path) -> int:
    """Return the free space of the disk under a folder, which need not exist yet. Raises ResourceError."""
    place = folder.absolute()
    while not os.path.isdir(place) and place != place.parent:  # Path.is_dir raises for a name that is too long
        place = place.parent
    try:
        return shutil.disk_usage(place).free
    except OSError as error:
        raise ResourceError(f"{place} cannot be examined ({error.strerror}): choose another --home") from error
