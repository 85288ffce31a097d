"""The corpus of a run of pages: the index is read, and each page when a sample of it is."""

from __future__ import annotations

from pathlib import Path

from peer.data.pages.cache import CachedPages
from peer.data.pages.corpus import PagedCorpus
from peer.data.pages.folder import BuiltPages, load_index
from peer.data.pages.index import check_vocabulary
from peer.ipc.corpus_messages import LoadCorpus


def open_pages(load: LoadCorpus) -> PagedCorpus:
    """Return the corpus of a run's data set, whose pages come to the folders that `load` names. Raises ConfigError."""
    folders, wanted = load.pages, load.data.pages
    assert folders is not None and wanted is not None
    index = load_index(Path(folders.index), wanted)
    check_vocabulary(index, load.vocab_size)
    built = [BuiltPages(Path(folders.built), index)] if folders.built else []
    return PagedCorpus(index, wanted.root, [CachedPages(Path(folders.cache)), *built])  # the cache first: it is checked
