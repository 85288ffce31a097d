"""Facts about a machine's text, as the worker reports them to the network process."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peer.bounds import Number
from peer.catalogue.machine import CorpusRead

_PIECE_CHARS: Final = 250  # less than what an event keeps of one string


class CorpusFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of a corpus, and what was left out of it."""

    files: Number
    """Files whose text is in it; 0 for a data set of pages, which does not say of how many it was made."""
    documents: Number = 0
    """Texts: a JSON or .parquet file holds many."""
    train_bytes: Number
    """Text to train on, as UTF-8."""
    held_out_bytes: Number
    """Text held out for the held-out loss, as UTF-8."""
    train_tokens: Number
    held_out_tokens: Number
    truncated: bool
    """Whether the limit of bytes left out any text."""
    account: Annotated[str, msgspec.Meta(max_length=2048)]
    """For display: files, sizes, what was skipped by kind and count, and the suffixes read if a file has another."""

    def event(self) -> CorpusRead:
        """Return the event, with the account in pieces that an event does not cut."""
        starts = range(0, len(self.account), _PIECE_CHARS)
        pieces = tuple(self.account[start : start + _PIECE_CHARS] for start in starts)
        return CorpusRead(**msgspec.structs.asdict(self) | {"account": pieces})

    @classmethod
    def of(cls, event: CorpusRead) -> CorpusFacts:
        """Return what an event tells. Raises `msgspec.ValidationError` for values out of their bounds."""
        return msgspec.convert({**event.as_fields(), "account": "".join(event.account)}, cls)
