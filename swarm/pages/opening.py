"""Opening a peer's supply of samples for as long as it is in the run: its index, its cache, and the tasks beside it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import trio
from blake3 import blake3

from peer.catalogue.pages import DataSetOpened
from peer.config import PagesConfig
from peer.data.pages.cache import PageCache
from peer.data.pages.folder import INDEX, BuiltPages
from peer.data.pages.index import INDEX_BYTES_MAX, PageIndex, check_vocabulary, read_index
from peer.data.pages.library import PageLibrary
from peer.errors import ConfigError, NetworkError, ResourceError
from peer.files import read_bounded, write_atomically
from peer.ipc.corpus_messages import PageFolders
from peer.notifier import beside_block
from swarm.pages.fetching import PageFetcher
from swarm.pages.holders import PageHolders
from swarm.pages.mirror import Mirror
from swarm.pages.server import serve_pages
from swarm.pages.sizes import cache_bytes
from swarm.pages.supply import PageSupply
from swarm.protocol.samples import OwnSamples, SampleSupply
from swarm.run.peer_context import JoinConfig, PeerContext

INDEX_TRIES: Final = 5
INDEX_PAUSE_S: Final = 3.0


@asynccontextmanager
async def open_samples(context: PeerContext) -> AsyncIterator[SampleSupply]:
    """Open the supply of the run's samples. In a run of pages this peer fetches, keeps and serves them inside the
    block. Raises ConfigError for a folder of another data set, NetworkError where no peer gives the index,
    ResourceError."""
    manifest, host = context.manifest, context.host
    wanted = manifest.data.pages
    if wanted is None:
        yield OwnSamples()
        return
    holders = PageHolders(context.node, context.gate, manifest.run_id, host.peer_id, host.events)

    def of_page(page: int) -> Sequence[str]:
        return holders.view.holders(page) if holders.view is not None else ()

    fetcher = PageFetcher(host, wanted, of_page, [manifest.authority], holders.reputation)
    mirror = Mirror(context.config.data_url, wanted) if context.config.data_url else None
    built = await trio.to_thread.run_sync(named_pages, context.config, wanted)
    encoded = await _index(context, wanted, fetcher, mirror, built)
    index = read_index(encoded, str(context.home.page_index), wanted)
    check_index(index, manifest.tokenizer, manifest.data.seq_len)
    check_vocabulary(index, manifest.model.vocab_size)
    library = await trio.to_thread.run_sync(_library, context, index, built)
    host.events.emit(
        DataSetOpened(
            root=wanted.root,
            tokens=index.train.windows * (index.seq_len + 1),
            pages=index.pages,
            size_bytes=index.size_bytes,
            cache_bytes=library.cache.limit_bytes,
            folder="" if built is None else str(built.folder),
        )
    )
    holders.begin(index.pages, lambda: library.held)
    serve_pages(host.rpc, encoded, library, context.uploads)
    folders = PageFolders(
        str(context.home.page_index.absolute()),
        str(context.home.pages.absolute()),
        "" if built is None else str(built.folder.absolute()),
    )

    async def fetch(page: int) -> bytes:
        try:
            return await fetcher.fetch_page(index, page)
        except NetworkError:
            if mirror is None:
                raise
            return await mirror.fetch_page(index, page)

    is_busy = lambda: context.uploads.in_exchange or context.pause.paused  # noqa: E731
    supply = PageSupply(library, folders, fetch, holders, manifest.run.seed, host.events, is_busy)
    async with beside_block() as tasks:
        tasks.start_soon(holders.run)
        tasks.start_soon(supply.run)
        yield supply


def named_pages(config: JoinConfig, wanted: PagesConfig) -> BuiltPages | None:
    """Return the data set of the folder that this machine's user has named. Raises ConfigError for another one."""
    return BuiltPages.open(Path(config.text.folder), wanted) if config.text.folder else None


def check_index(index: PageIndex, tokenizer: str, seq_len: int) -> None:
    """Raise ConfigError unless a data set is of that tokenizer, as a manifest names it, and length of sequences."""
    if index.tokenizer != tokenizer:
        raise ConfigError(
            f"the data set was made by the tokenizer {index.tokenizer[:16]} and the model's is {tokenizer[:16]}: build"
            " the data set with the model's tokenizer"
        )
    if index.seq_len != seq_len:
        raise ConfigError(
            f"the data set has sequences of {index.seq_len} tokens and the run of {seq_len}: set [data] seq_len ="
            f" {index.seq_len}, or build it with --seq-len {seq_len}"
        )


def _library(context: PeerContext, index: PageIndex, built: BuiltPages | None) -> PageLibrary:
    config = context.config
    limit_bytes = cache_bytes(config.home, index.size_bytes, config.data_cache_bytes)
    cache = PageCache(context.home.pages, index, limit_bytes)
    try:
        cache.open()
    except OSError as error:
        raise ResourceError(
            f"the cache of pages in {context.home.pages} cannot be opened ({error.strerror}): choose a folder of your"
            " own with --home"
        ) from error
    return PageLibrary(index, cache, built)


async def _index(
    context: PeerContext, wanted: PagesConfig, fetcher: PageFetcher, mirror: Mirror | None, built: BuiltPages | None
) -> bytes:
    """Return the index of the run's data set, which is then in the home. Raises NetworkError, ResourceError."""
    home = context.home
    for path in (home.page_index, None if built is None else built.folder / INDEX):
        found = b"" if path is None else await trio.to_thread.run_sync(_read, path)
        if blake3(found).hexdigest() == wanted.root:
            break
    else:
        found = await _fetched(fetcher, mirror, context)
    await trio.to_thread.run_sync(write_atomically, home.page_index, found)
    return found


def _read(path: Path) -> bytes:
    try:
        return read_bounded(path, INDEX_BYTES_MAX)
    except OSError:
        return b""


async def _fetched(fetcher: PageFetcher, mirror: Mirror | None, context: PeerContext) -> bytes:
    for attempt in range(INDEX_TRIES):
        try:
            return await fetcher.fetch_index(sorted(context.node.peers))
        except NetworkError as error:
            if mirror is not None:
                return await mirror.fetch_index()
            if attempt + 1 == INDEX_TRIES:
                raise NetworkError(
                    f"no peer gives the index of the run's data set ({error}): try again when more members are there,"
                    " or name a folder with the data set with --data"
                ) from error
        await trio.sleep(INDEX_PAUSE_S)
    raise AssertionError("unreachable")
