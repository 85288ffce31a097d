"""The checks of `peer doctor` on a data set of pages: that of a run, and one in a folder of this machine."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Final

from cli.checks.machine import Finding, failure
from peer.data.pages.folder import INDEX, BuiltPages, fault_of, read_page
from peer.data.pages.index import PageIndex, check_vocabulary
from peer.errors import BarnraiseError, ConfigError
from peer.figures import several, size_text
from swarm.pages.opening import check_index
from swarm.pages.sizes import DataSetSizes, cache_bytes, free_bytes
from swarm.run.manifest import Manifest

SAMPLED: Final = 8
"""Pages that are read beside the first and the last one."""
_CHECK: Final = "data set"
_AGAIN: Final = "copy the folder again, or build it again with `peer data build`"


def is_data_set(folder: str) -> bool:
    """Whether a folder holds a data set of pages, and no text."""
    return bool(folder) and (Path(folder) / INDEX).is_file()


def folder_finding(folder: Path, manifest: Manifest | None = None) -> Finding:
    """Check the data set in a folder: whether it is the run's, the sizes of its files, and some of its pages."""
    try:
        if manifest is not None and manifest.data.pages is None:
            raise ConfigError(
                f"{folder} is a data set of pages, and this run trains on each machine's own text: name a folder of"
                " text, or leave --data out"
            )
        built = BuiltPages.open(folder, None if manifest is None else manifest.data.pages)
        index = built.index
        if manifest is not None:
            check_index(index, manifest.tokenizer, manifest.data.seq_len)
            check_vocabulary(index, manifest.model.vocab_size)
        pages = sampled(index)
        for page in pages:
            place = built.find(page)
            if reason := fault_of(index, page, _read(built, page)):
                raise ConfigError(f"{place.path} at {place.offset} {reason}: {_AGAIN}")
    except BarnraiseError as error:
        return failure(_CHECK, error)
    tokens = index.seq_len + 1
    documents = index.train.documents + index.held_out.documents
    return Finding(
        _CHECK,
        "ok",
        f"{index.config.root[:16]}: {several(documents, 'document')}, {index.train.windows * tokens:,} tokens to train"
        f" on, {index.held_out.windows * tokens:,} held out, {size_text(index.size_bytes)} in"
        f" {several(index.pages, 'page')}; all files have their sizes, and the {several(len(pages), 'page')} that were"
        " read are intact",
    )


def sampled(index: PageIndex) -> list[int]:
    """Return the first page, the last one and some at random."""
    between = range(1, index.pages - 1)
    return sorted({0, index.pages - 1, *random.sample(between, min(SAMPLED, len(between)))})


def fetched_finding(manifest: Manifest, home: Path) -> Finding | None:
    """Tell what the pages of the run's data set take of this machine's disk; None for a run that reads text."""
    sizes = DataSetSizes.of(manifest.data)
    if sizes is None:
        return None
    try:
        cache, free = cache_bytes(home, sizes.size_bytes), free_bytes(home)
    except BarnraiseError as error:
        return failure(_CHECK, error)
    detail = (
        f"{sizes.root[:16]}: {sizes.tokens:,} tokens to train on, {size_text(sizes.size_bytes)} in all; no text is"
        f" needed here, as pages come from other peers, and a cache of at most {size_text(cache)} keeps them"
    )
    if cache > free:
        remedy = "free space for it, or choose another --home"
        return Finding(_CHECK, "warning", f"{detail}, where {size_text(free)} are free", remedy)
    return Finding(_CHECK, "ok", detail)


def _read(built: BuiltPages, page: int) -> bytes:
    place = built.find(page)
    try:
        return read_page(built.index, page, place)
    except OSError as error:
        raise ConfigError(f"{place.path} cannot be read ({error.strerror}): {_AGAIN}") from error
