"""The events of a run's data set: which pages come, stay and are missing."""

from __future__ import annotations

from typing import ClassVar

from peer.catalogue.happening import Happening, Trouble, Who
from peer.figures import several, size_text


class CacheShrunk(Happening, frozen=True):
    """The disk is full: the cache of pages may not grow beyond `limit_bytes`."""

    limit_bytes: int

    def sentence(self, teller: str, who: Who) -> str:
        return (
            f"{teller} has a full disk: its cache of pages holds {size_text(self.limit_bytes)} from now on; free some"
            " space and start again for more"
        )


class DataSetOpened(Happening, frozen=True):
    """The run's data set, and the room that this machine has for its pages."""

    root: str
    tokens: int = 0
    """To train on."""
    pages: int = 0
    size_bytes: int = 0
    """Of all pages."""
    cache_bytes: int = 0
    folder: str = ""
    """Where this machine has all pages; empty for none."""

    def sentence(self, teller: str, who: Who) -> str:
        of = f"{teller} trains on the data set {self.root[:16]} of {size_text(self.size_bytes)}"
        if self.folder:
            return f"{of}, all of which is in {self.folder}"
        return f"{of}; pages from other peers take at most {size_text(self.cache_bytes)} of this disk"


class HoldersUnread(Trouble, frozen=True):
    """The records of who keeps which pages could not be written or read; they are tried again."""

    said: ClassVar = "{teller} cannot publish which pages it keeps, or read what others do{why}; it tries again"


class PageDamaged(Happening, frozen=True):
    said: ClassVar = "{teller}: page {page} in {path} is not what its index names; it is fetched from others instead"
    page: int
    path: str


class PageMissing(Happening, frozen=True):
    """A page that this peer trains on does not come; it is asked for again and again."""

    told: ClassVar = ("page",)
    said: ClassVar = "{teller} waits for page {page} of the data set{why}"
    page: int
    reason: str = ""


class PagesKept(Happening, frozen=True):
    """How much of the data set this peer keeps, and how much of it too few peers keep."""

    told: ClassVar = ("pages", "total", "ranges", "rare")
    pages: int
    total: int = 0
    ranges: int = 0
    rare: int = 0
    """Ranges of pages with fewer than two holders."""


class SamplesHashed(Happening, frozen=True):
    """The first samples that this peer has trained on, and the hash of their tokens (`peer data show --samples`)."""

    told: ClassVar = ("samples", "hash")
    samples: str
    """Half-open ranges of numbers: "0-80,240-320"."""
    hash: str = ""


class SamplesAwaited(Happening, frozen=True):
    """The worker was idle for want of pages."""

    told: ClassVar = ("seconds", "pages")
    seconds: float
    pages: int = 0

    def sentence(self, teller: str, who: Who) -> str:
        return f"{teller} waited {self.seconds:.1f} s for {several(self.pages, 'page')} of the data set"
