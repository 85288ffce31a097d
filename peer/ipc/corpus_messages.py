"""The first message to the "corpus" program, which reads and tokenizes this machine's text. It takes no commands."""

from __future__ import annotations

import msgspec

from peer.config import DataConfig


class LoadCorpus(msgspec.Struct, frozen=True, tag="load_corpus", kw_only=True):
    """The first message to a worker that reads a corpus."""

    data: DataConfig
    tokenizer: str
    vocab_size: int
    """Of the model: the tokenizer may have no more ids."""
    data_folder: str
    """The folder of text that this machine's user has named; "" for none."""
    text_field: str
    """What holds the text in .jsonl and .parquet files, as this machine's user has named it; "" for `text`."""
    directory: str
    """The one folder that the worker may write."""
