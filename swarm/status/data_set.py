"""How far a run is in its data set, and who keeps its pages, as plain values."""

from __future__ import annotations

from typing import Annotated

import msgspec


class MemberPages(msgspec.Struct, frozen=True, kw_only=True):
    """The pages of one peer, by its own words."""

    kept: int = 0
    waited_s: float = 0.0
    """In which its worker was idle for want of pages, in the last ten minutes."""


class MissingPage(msgspec.Struct, frozen=True, kw_only=True):
    """A page that peers wait for, as they say, and do not keep yet."""

    page: int
    peers: tuple[str, ...]
    holders: int
    """That say that they keep it."""


class DataSetState(msgspec.Struct, frozen=True, kw_only=True):
    """The data set of a run."""

    root: str
    tokens: Annotated[int, msgspec.Meta(ge=1)]
    """That an epoch trains on, as `MonitorState.tokens` counts."""
    epochs: float
    """That the run has trained on so far."""
    tokens_left: int
    """Of the epoch that it is in."""
    pages: int
    ranges: int
    """Of pages: a peer that keeps a whole one says so."""
    rare: int
    """Ranges that fewer than two peers keep."""
    unkept: int
    """Ranges that no peer keeps."""
    waited_s: float
    """Of all peers."""
    members: dict[str, MemberPages] = {}
    """Of those peers that keep pages or wait for some."""
    missing: tuple[MissingPage, ...] = ()
    """The first ones of them."""
