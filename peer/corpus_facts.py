"""Facts about a machine's text, as the worker reports them to the network process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from peer.bounds import Number

_PIECE_CHARS: Final = 250  # less than what an event keeps of one string


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
    """For display: files, sizes, what was skipped by kind and count, and the suffixes read if a file has another."""

    def event_fields(self) -> dict[str, Any]:
        """Return the fields of an event, with the account in pieces that an event does not cut."""
        starts = range(0, len(self.account), _PIECE_CHARS)
        pieces = [self.account[start : start + _PIECE_CHARS] for start in starts]
        return msgspec.structs.asdict(self) | {"account": pieces}


def account_in(fields: Mapping[str, Any]) -> str:
    """Return the account of what was read from the fields of an event; empty for a field of another form."""
    pieces = fields.get("account")
    return "".join(map(str, pieces)) if isinstance(pieces, (list, tuple)) else ""
