"""Pages from other peers over real sockets: a liar, a mute one and one that leaves among those who keep them."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from peer.data.pages.cache import PageCache
from peer.data.pages.folder import BuiltPages, read_page
from peer.data.pages.index import encode_index
from peer.data.pages.library import PageLibrary
from peer.errors import ConfigError, NetworkError, RemoteError
from peer.events import Event
from peer.net.host import Host
from peer.net.rpc import Buffer, Call
from swarm.pages.chunks import PAGE_CHUNK
from swarm.pages.fetching import PageFetcher
from swarm.pages.holdings import Reputation
from swarm.pages.server import LEAVING_MAX, serve_pages
from swarm.state.messages import AskChunk, StateReply
from swarm.state.upload_limits import SnapshotLimits, UploadSlots
from tests.peer.data.pages.data_sets import write_data_set
from tests.swarm.support.state_donors import bare_host

SEQ_LEN = 4095
PAGES = 4

Handler = Callable[[Call[AskChunk]], Awaitable[Any]]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> BuiltPages:
    folder = tmp_path_factory.mktemp("set")
    write_data_set(folder, seq_len=SEQ_LEN, windows=(PAGES - 1) * 512 + 100)
    return BuiltPages.open(folder)


def library_of(built: BuiltPages) -> PageLibrary:
    return PageLibrary(built.index, PageCache(built.folder, built.index, 0), built)


@asynccontextmanager
async def hosts(count: int) -> AsyncIterator[list[Host]]:
    """Hosts of which the first knows the others."""
    async with AsyncExitStack() as stack:
        found = [await stack.enter_async_context(bare_host()) for _ in range(count)]
        for other in found[1:]:
            found[0].book.add(other.peer_id, other.addresses)
        yield found


def honest(host: Host, built: BuiltPages, limits: SnapshotLimits | None = None) -> Host:
    serve_pages(host.rpc, encode_index(built.index), library_of(built), UploadSlots(limits or SnapshotLimits()))
    return host


def odd(host: Host, answer: Handler) -> Host:
    host.rpc.register(PAGE_CHUNK, answer)
    return host


def fetcher_of(me: Host, built: BuiltPages, holders: Sequence[Host], last_resort: Sequence[Host] = ()) -> PageFetcher:
    names = [host.peer_id for host in holders]
    return PageFetcher(me, built.index.config, lambda page: names, [host.peer_id for host in last_resort], Reputation())


def page_of(built: BuiltPages, page: int) -> bytes:
    return read_page(built.index, page, built.find(page))


async def test_each_page_and_the_index_come_whole(built: BuiltPages) -> None:
    async with hosts(2) as (me, donor):
        fetcher = fetcher_of(me, built, [honest(donor, built)])
        for page in range(built.index.pages):
            assert await fetcher.fetch_page(built.index, page) == page_of(built, page)
        assert await fetcher.fetch_index([donor.peer_id]) == encode_index(built.index)


async def test_the_last_resort_is_not_asked_where_a_holder_delivers(built: BuiltPages) -> None:
    asked = list[int]()

    async def counted(call: Call[AskChunk]) -> StateReply:
        asked.append(call.body.index)
        return StateReply("gone")

    async with hosts(3) as (me, holder, coordinator):
        fetcher = fetcher_of(me, built, [honest(holder, built)], [odd(coordinator, counted)])
        for page in range(PAGES):
            await fetcher.fetch_page(built.index, page)
        assert not asked


async def test_a_liar_is_refused_penalized_and_not_asked_again(built: BuiltPages) -> None:
    asked = list[int]()

    async def flipped(call: Call[AskChunk]) -> tuple[StateReply, Buffer]:
        asked.append(call.body.index)
        right = page_of(built, call.body.index - 1)
        return StateReply("here"), right[:-1] + bytes([right[-1] ^ 1])

    async with hosts(3) as (me, liar, donor):
        told: list[Event] = []
        fetcher = fetcher_of(me, built, [odd(liar, flipped), honest(donor, built)])
        with me.events.subscribed(told.append):
            while not asked:  # which of the two is asked first is chance
                assert await fetcher.fetch_page(built.index, 0) == page_of(built, 0)
            for page in range(PAGES):
                assert await fetcher.fetch_page(built.index, page) == page_of(built, page)
        assert len(asked) == 1 and fetcher.reputation.liars == {liar.peer_id}
        assert [event.fields["peer"] for event in told if event.name == "peer_penalized"] == [liar.peer_id]


async def test_a_slow_holder_is_awaited_once_it_is_known_how_long_pages_take(built: BuiltPages) -> None:
    asked = list[int]()

    async def slow(call: Call[AskChunk]) -> tuple[StateReply, Buffer]:
        await trio.sleep(2.0)  # longer than the 1 s that counts as late while no page has come: the subject
        return StateReply("here"), page_of(built, call.body.index - 1)

    async def counted(call: Call[AskChunk]) -> StateReply:
        asked.append(call.body.index)
        return StateReply("gone")

    async with hosts(3) as (me, holder, coordinator):
        fetcher = fetcher_of(me, built, [odd(holder, slow)], [odd(coordinator, counted)])
        await fetcher.fetch_page(built.index, 0)
        assert asked, "how long a page takes was not known"
        asked.clear()
        await fetcher.fetch_page(built.index, 1)
        assert not asked


async def test_pages_leave_a_few_at_a_time(built: BuiltPages) -> None:
    """A start of many peers: a page that shares the link with all others would come after its deadline."""
    library, slots = library_of(built), UploadSlots(SnapshotLimits(rate=1e6, wait_max_s=1e3))
    async with hosts(LEAVING_MAX + 3) as (donor, *others):
        serve_pages(donor.rpc, encode_index(built.index), library, slots)
        answers = list[StateReply]()
        root = bytes.fromhex(built.index.config.root)

        async def ask(other: Host) -> None:
            other.book.add(donor.peer_id, donor.addresses)
            answers.append((await other.rpc.call(donor.peer_id, PAGE_CHUNK, AskChunk(root, 1), timeout_s=60.0)).body)
            if len(answers) == 2:
                nursery.cancel_scope.cancel()

        with trio.fail_after(30):
            async with trio.open_nursery() as nursery:
                for other in others:
                    nursery.start_soon(ask, other)
        assert "busy" in [answer.outcome for answer in answers]


async def test_a_mute_holder_costs_a_moment_once(built: BuiltPages) -> None:
    asked = list[int]()

    async def mute(call: Call[AskChunk]) -> StateReply:
        asked.append(call.body.index)
        await trio.sleep_forever()
        raise AssertionError

    async with hosts(3) as (me, silent, donor):
        fetcher = fetcher_of(me, built, [odd(silent, mute), honest(donor, built)])
        with trio.fail_after(25):  # less than its deadline
            for page in range(PAGES):
                assert await fetcher.fetch_page(built.index, page) == page_of(built, page)
            while not asked:
                await fetcher.fetch_page(built.index, 0)
        assert len(asked) == 1, "it rests"


async def test_a_holder_that_leaves_in_the_midst_is_replaced(built: BuiltPages) -> None:
    begun = trio.Event()

    async def stuck(call: Call[AskChunk]) -> StateReply:
        begun.set()
        await trio.sleep_forever()
        raise AssertionError

    opened, leaves = list[Host](), trio.Event()

    async def leaver() -> None:
        async with bare_host() as host:
            opened.append(odd(host, stuck))
            await leaves.wait()

    async with hosts(2) as (me, donor), trio.open_nursery() as nursery:
        nursery.start_soon(leaver)
        while not opened:
            await trio.sleep(0.01)
        me.book.add(opened[0].peer_id, opened[0].addresses)
        fetcher, found = fetcher_of(me, built, opened, [donor]), list[bytes]()

        async def fetch() -> None:
            found.append(await fetcher.fetch_page(built.index, 1))

        nursery.start_soon(fetch)
        await begun.wait()
        honest(donor, built)
        leaves.set()
    assert found == [page_of(built, 1)]


async def test_a_record_that_is_out_of_date_leads_to_the_last_resort(built: BuiltPages, tmp_path: Path) -> None:
    empty = PageCache(tmp_path / "cache", built.index, 0)
    async with hosts(3) as (me, holder, coordinator):
        library = PageLibrary(built.index, empty, None)
        serve_pages(holder.rpc, encode_index(built.index), library, UploadSlots(SnapshotLimits()))
        fetcher = fetcher_of(me, built, [holder], [honest(coordinator, built)])
        for page in range(2):
            assert fetcher.reputation.believes(holder.peer_id), "it may just have given that page up"
            assert await fetcher.fetch_page(built.index, page) == page_of(built, page)
        assert not fetcher.reputation.believes(holder.peer_id)


async def test_without_a_holder_there_is_one_sentence(built: BuiltPages) -> None:
    async with hosts(2) as (me, _):
        with pytest.raises(NetworkError, match="no peer that can be reached keeps page 2"):
            await fetcher_of(me, built, []).fetch_page(built.index, 2)


async def test_an_index_from_a_liar_is_refused(built: BuiltPages) -> None:
    other = encode_index(msgspec.structs.replace(built.index, seed=99))

    async def lie(call: Call[AskChunk]) -> tuple[StateReply, Buffer]:
        return StateReply("here"), other

    async with hosts(3) as (me, liar, donor):
        fetcher = fetcher_of(me, built, [], [odd(liar, lie)])
        assert await fetcher.fetch_index([honest(donor, built).peer_id]) == encode_index(built.index)
        assert fetcher.reputation.liars == {liar.peer_id}


async def test_a_page_with_its_hash_and_ids_beyond_the_vocabulary_is_not_trained_on(tmp_path: Path) -> None:
    write_data_set(tmp_path, seq_len=15, windows=40, vocab_size=300)
    true = BuiltPages.open(tmp_path)
    built = BuiltPages(tmp_path, msgspec.structs.replace(true.index, vocab_size=256))

    async def answer(call: Call[AskChunk]) -> tuple[StateReply, Buffer]:
        return StateReply("here"), page_of(true, call.body.index - 1)

    async with hosts(2) as (me, donor):
        fetcher = fetcher_of(me, built, [odd(donor, answer)])
        with pytest.raises(ConfigError, match="is not in the vocabulary of 256: no peer can train on it"):
            await fetcher.fetch_page(built.index, 0)
        assert not fetcher.reputation.liars, "its sender is not to blame"


async def test_nonsense_is_refused_and_another_data_set_is_not_served(built: BuiltPages) -> None:
    root = bytes.fromhex(built.index.config.root)
    async with hosts(2) as (me, donor):
        honest(donor, built)

        async def ask(state: bytes, index: int) -> StateReply:
            reply = await me.rpc.call(donor.peer_id, PAGE_CHUNK, AskChunk(state, index), timeout_s=30)
            return reply.body

        assert (await ask(bytes(32), 1)).outcome == "gone"
        assert (await ask(root, built.index.pages)).outcome == "here"
        with pytest.raises(RemoteError, match=f"asked for chunk {built.index.pages + 1} of {built.index.pages + 1}"):
            await ask(root, built.index.pages + 1)


async def test_pages_step_back_while_an_exchange_needs_the_link(built: BuiltPages) -> None:
    slots = UploadSlots(SnapshotLimits(share_in_exchange=1e-9, wait_max_s=0.0))
    root = bytes.fromhex(built.index.config.root)
    async with hosts(2) as (me, donor):
        serve_pages(donor.rpc, encode_index(built.index), library_of(built), slots)

        async def ask(index: int) -> str:
            reply = await me.rpc.call(donor.peer_id, PAGE_CHUNK, AskChunk(root, index), timeout_s=30)
            return reply.body.outcome

        with slots.stepping_back():
            assert [await ask(1), await ask(2)] == ["here", "busy"]
        assert await ask(2) == "here"
