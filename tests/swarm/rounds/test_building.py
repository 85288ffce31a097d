"""Builders of the next state take turns for its room: the last one to come has it, however many wait."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import trio
import trio.testing

from optim.bundles import Bundles
from peer.errors import NetworkError
from swarm.protocol.head import genesis
from swarm.rounds.building import StateBuilder
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange.slice_exchange import SliceExchange
from swarm.rounds.fetched_states import FetchedStates
from swarm.rounds.result_log import LoggedResult, ResultLog
from swarm.state.fetch import Fetched

HERE, NEXT = b"h" * 32, b"n" * 32
LIMIT_S = 60.0


class HeldState:
    """An outer state of one slice; the first builder that begins is held in its thread, which cannot be cancelled."""

    def __init__(self) -> None:
        self.tree = SimpleNamespace(root=HERE)
        self.tensors = ()
        self.strategy = SimpleNamespace(coding=lambda round_info, tensors: SimpleNamespace(count=1))
        self.begun = 0
        self.go_on = threading.Event()

    def begin(self, round_info: object, coding: object) -> None:
        self.begun += 1
        assert self.go_on.wait(LIMIT_S)

    def build(self, index: int, part: memoryview) -> None:
        pass

    def hash_next(self) -> bytes:
        return NEXT


def exchange_without_results(key: bytes) -> SliceExchange:
    """Return an exchange of one slice whose owner is cut off: its result never comes."""

    async def any_result(index: int) -> Any:
        await trio.sleep_forever()

    order = SimpleNamespace(
        key=key, before=genesis("run", HERE), round_info=None, coding=None, bundles=Bundles(1), filled=range(1)
    )
    return cast(SliceExchange, SimpleNamespace(order=order, any_result=any_result))


async def test_a_replay_does_not_wait_for_a_builder_that_waited_before_it(tmp_path: Path) -> None:
    """A peer that was cut off is told the roster of a round that the others have finished since: the replay of that
    round must not wait for the results, which no owner sends any more."""
    state = HeldState()
    schedule = SimpleNamespace(round_info=lambda head: None)
    context = cast(RoundContext, SimpleNamespace(state=state, schedule=schedule))
    builder = StateBuilder(context, ResultLog(tmp_path))
    followed = trio.Event()

    async def follow() -> None:
        assert await builder.follow(LoggedResult(genesis("run", HERE), NEXT, [memoryview(b"result")]))
        followed.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(builder.build_ahead, exchange_without_results(b"before"))
        while not state.begun:
            await trio.sleep(0.01)
        nursery.start_soon(builder.build_ahead, exchange_without_results(b"of a round that is over"))
        await trio.testing.wait_all_tasks_blocked(0.05)
        nursery.start_soon(follow)
        await trio.testing.wait_all_tasks_blocked(0.05)
        state.go_on.set()
        with trio.fail_after(LIMIT_S):
            await followed.wait()
        nursery.cancel_scope.cancel()


class CountedState(HeldState):
    """An outer state whose slices are what was built into them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts: dict[int, bytes] = {}
        self.hashed = 0
        self.go_on.set()

    def build(self, index: int, part: memoryview) -> None:
        self.parts[index] = bytes(part)

    def hash_next(self) -> bytes:
        self.hashed += 1
        return self.parts[0].ljust(32, b" ")


class SentResults:
    """An exchange of one slice: `sent` by its owner, `named` as it has signed for it, which no peer may have."""

    def __init__(self, sent: bytes, named: bytes | None) -> None:
        self._sent, self._named = sent, named
        self.order = SimpleNamespace(
            key=b"key", before=genesis("run", HERE), round_info=SimpleNamespace(round=1), coding=None,
            bundles=Bundles(1), filled=range(1), owners=["A"], check=lambda bundle, results: None,
        )  # fmt: skip

    async def any_result(self, bundle: int) -> tuple[bytes, list[memoryview]]:
        await trio.lowlevel.checkpoint()
        return self._sent, [memoryview(self._sent)]

    async def result(self, bundle: int, name: bytes, holders: object) -> list[memoryview]:
        await trio.lowlevel.checkpoint()
        if self._named is None:
            raise NetworkError("no peer has the result of slice 0")
        return [memoryview(self._named)]


def builder_of(state: object, folder: Path) -> StateBuilder:
    events = SimpleNamespace(emit=lambda name, **fields: None)
    context = SimpleNamespace(state=state, schedule=SimpleNamespace(round_info=lambda head: None), events=events)
    return StateBuilder(cast(RoundContext, context), ResultLog(folder))


async def test_what_was_built_ahead_is_hashed_once(tmp_path: Path) -> None:
    state = CountedState()
    builder, exchange = builder_of(state, tmp_path), cast(SliceExchange, SentResults(b"sent", b"sent"))
    ahead = await builder.build_ahead(exchange)
    assert ahead is not None and ahead.result.leads_to == b"sent".ljust(32)
    assert builder.holds == [HERE, ahead.result.leads_to]
    assert await builder.build(exchange, [b"sent"], []) == ahead and state.hashed == 1


async def test_what_was_built_ahead_from_other_slices_counts_for_nothing(tmp_path: Path) -> None:
    """The owner has signed for another result than it sent here: that is built, or nothing if no peer has it."""
    for named in (b"signed", None):
        state = CountedState()
        builder, exchange = builder_of(state, tmp_path), cast(SliceExchange, SentResults(b"sent", named))
        assert await builder.build_ahead(exchange) is not None
        built = await builder.build(exchange, [b"signed"], [])
        assert (built.result.leads_to if built is not None else None) == (named and named.ljust(32))


async def test_a_state_that_the_node_has_gone_to_already_outlives_the_commit_before_it(tmp_path: Path) -> None:
    """It was fetched while the record of the head before was written: its own commit found nothing to commit."""

    class Replaced:
        """An outer state that is only replaced."""

        def __init__(self) -> None:
            self.tree = SimpleNamespace(root=HERE)
            self.next_hash = b""
            self.tensors = ()
            self.current = None

        def replace(self, tensors: object, tree: Any) -> None:
            self.tree = tree

    state = Replaced()
    fetched = FetchedStates(tmp_path, 8, 2)
    snapshots = SimpleNamespace(publish=lambda *_: None)
    builder = StateBuilder(cast(RoundContext, SimpleNamespace(state=state, snapshots=snapshots)), ResultLog(tmp_path))
    later = b"l" * 32
    for name in (HERE, NEXT, later):
        fetched.path_of(name).parent.mkdir(exist_ok=True)
        fetched.path_of(name).write_bytes(bytes(8))
    builder.offer_fetched(cast(Fetched, SimpleNamespace(tensors=(), tree=SimpleNamespace(root=later))))
    await builder.commit(genesis("run", HERE), later)
    await fetched.committed(HERE, later)
    assert {path.name for path in fetched.path_of(HERE).parent.iterdir()} == {
        fetched.path_of(HERE).name,
        fetched.path_of(later).name,
    }
    await builder.commit(genesis("run", later), later)
    await fetched.committed(later, later)
    assert state.tree.root == later and builder.holds == [later]
    assert fetched.base == later and not fetched.path_of(HERE).exists()
