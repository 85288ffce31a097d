"""The first message to the "corpus" program, which reads and tokenizes this machine's text. It takes no commands."""

from __future__ import annotations

import msgspec

from peer.config import DataConfig


class OwnText(msgspec.Struct, frozen=True):
    """The text that this machine's user has named."""

    folder: str = ""
    """A folder or file; "" for none."""
    field: str = ""
    """The field with the text in .jsonl and .parquet files; "" for `text`."""


class PageFolders(msgspec.Struct, frozen=True):
    """Where the pages of the run's data set lie on this machine. The network process has checked each before the worker
    is asked to train on it."""

    index: str
    """The file of the index."""
    cache: str
    """The folder of pages that came from other peers."""
    built: str = ""
    """The folder of a data set that this machine's user has named; "" for none."""


class LoadCorpus(msgspec.Struct, frozen=True, tag="load_corpus", kw_only=True):
    """The first message to a worker that reads a corpus."""

    data: DataConfig
    tokenizer: str
    vocab_size: int
    """The model's: the tokenizer may have no more ids."""
    text: OwnText
    pages: PageFolders | None = None
    """Of a run that trains on a data set."""
    directory: str
    """The one folder that the worker may write."""
