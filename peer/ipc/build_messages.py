"""The protocol of the "build" program, which makes token ids of files for `peer data build`."""

from __future__ import annotations

import msgspec

from peer.ipc.messages import Command


class LoadBuild(msgspec.Struct, frozen=True, tag="load_build", kw_only=True):
    """The first message to a worker that makes token ids of files."""

    plan: str
    """The file of the build's plan."""
    tokenizer: str
    """"bytes", or the path of a tokenizer.json."""
    readable: tuple[str, ...]
    """The files and folders in which the plan's files lie."""
    directory: str
    """The one folder that the worker may write."""


class GatherDocuments(Command, frozen=True, tag="gather"):
    """Requests that the plan's files are put into buckets, as a `GatheredText`. Signs of life carry the bytes of files
    that are behind."""

    is_strict: bool
    """Whether a file that cannot be read is an error."""
