"""The data set of a run, at the coordinator: what the manifest says of it, and its pages for members that have none."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace as changed

from peer.config import PagesConfig
from peer.data.pages.cache import PageCache
from peer.data.pages.folder import TOKENIZER, BuiltPages
from peer.data.pages.index import check_vocabulary, encode_index
from peer.data.pages.library import PageLibrary
from peer.errors import ConfigError
from peer.net.host import Host
from swarm.membership.open_peer import OpenPeer
from swarm.pages.holders import PageHolders
from swarm.pages.opening import check_index
from swarm.pages.server import serve_pages
from swarm.run.config import RunConfig
from swarm.run.manifest import Manifest
from swarm.run.sections import AUTO_TOKENIZER
from swarm.run.tokenizer import read_tokenizer
from swarm.state.upload_limits import SnapshotLimits, UploadSlots

_NAME_IT: Final = "name its folder with --data (`peer data build` writes one)"


def with_data_set(run: RunConfig, data: Path | None) -> RunConfig:
    """Return the settings of a new run with what the data set in the folder `data` fixes. Raises ConfigError for a
    folder without one, for none where RUN.toml wants one, and for one that it does not want."""
    if (run.data.source == "pages") != (data is not None):
        if data is None:
            raise ConfigError(f'this run trains on a data set, as [data] source is "pages": {_NAME_IT}')
        raise ConfigError(
            f'--data names a data set, and RUN.toml has [data] source = "{run.data.source}": set it to "pages", or'
            " leave --data out"
        )
    if data is None:
        return run
    index = BuiltPages.open(data).index
    tokenizer = run.tokenizer
    if tokenizer.source == AUTO_TOKENIZER and run.pretrained is None and (data / TOKENIZER).is_file():
        tokenizer = changed(tokenizer, source=str(data / TOKENIZER))
    pages = changed(run.data, pages=index.config, end_of_text=index.end_of_text)
    found = changed(run, data=pages, tokenizer=tokenizer)
    check_index(index, read_tokenizer(found)[1], run.data.seq_len)
    if run.model is not None:
        check_vocabulary(index, run.model.vocab_size)
    return found


def open_data_set(data: Path | None, wanted: PagesConfig | None) -> PageLibrary | None:
    """Return the data set in the folder `data`, if it is the run's; None without one. Raises ConfigError."""
    if data is None:
        return None
    if wanted is None:
        raise ConfigError("the run in this home trains on no data set: leave --data out")
    built = BuiltPages.open(data, wanted)
    return PageLibrary(built.index, PageCache(data, built.index, 0), built)


def offer(host: Host, library: PageLibrary) -> None:
    """Serve all pages to members from now on."""
    serve_pages(host.rpc, encode_index(library.index), library, UploadSlots(SnapshotLimits()))


def tell_of(peer: OpenPeer[Manifest], library: PageLibrary) -> Callable[[], Awaitable[None]]:
    """Return the task that publishes that all pages are here."""
    host, run = peer.host, peer.run
    holders = PageHolders(peer.node, run.gate, run.manifest.run_id, host.peer_id, host.events)
    holders.begin(library.index.pages, lambda: library.held)
    return holders.run
