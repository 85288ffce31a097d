"""What was read of a machine's text, as the worker tells the network process."""

from __future__ import annotations

from typing import Annotated

import msgspec

from peer.bounds import Number


class CorpusFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a corpus, and what was left out of it."""

    files: Number
    """Files whose text is in it."""
    documents: Number = 0
    """Of these files: a JSON or .parquet file holds many."""
    train_bytes: Number
    """Text to train on, as UTF-8."""
    held_out_bytes: Number
    """Text held out for the held-out loss, as UTF-8."""
    train_tokens: Number
    held_out_tokens: Number
    truncated: bool
    """Whether the limit of bytes left out any text."""
    account: Annotated[str, msgspec.Meta(max_length=2048)]
    """For people: files, sizes, what was skipped by kind and count, and the suffixes read if a file has another."""
