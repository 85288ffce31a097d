"""The tasks of one fetch: one for each donor, with a few calls under way each, and one that watches over them.

A donor may be slow, freeze, die, be busy, or lie. Its chunks then go to other donors (`swarm.state.chunk_scheduler`),
and the fetch ends when the fast donors are done.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from peer import faults
from peer.catalogue.groups import PeerPenalized
from peer.catalogue.rounds import StateProgress
from peer.checkpoint.hash_tree import StateTree
from peer.errors import NetworkError, ProtocolViolation, RemoteError, ResourceError
from peer.events import EventLog
from peer.net.rpc import Method, Reply, Rpc
from peer.net.rpc_server import UNKNOWN_METHOD
from swarm.state.chunk_scheduler import NO_HOPE, Ask, ChunkScheduler, ChunkTree, Donor, DonorStatus
from swarm.state.messages import AskChunk, AskHashes, StateMethods, StateReply

CALLS_PER_DONOR: Final = 3  # hides the round trip of a fast link without queueing much on a slow one
DONORS_AT_ONCE: Final = 8  # times CALLS_PER_DONOR times 4 MiB: what a fetch costs in memory
HASHES_S: Final = 10.0
BUSY_PAUSE_MAX_S: Final = 5.0
REST_S: Final = 0.5
REST_MAX_S: Final = 8.0
GONE_REST_S: Final = 0.1  # a donor may be about to publish the state
HOPELESS_S: Final = 0.4  # short: a group that has gone on has a newer state, which soon will be gone, too
HOPELESS_FAILURES: Final = 4
STALL_S: Final = 60.0
_POLL_S: Final = 0.1
_PROGRESS_EVERY_S: Final = 1.0
_REMEDY: Final = "try again, or wait until more peers are reachable"


class StateGone(NetworkError):
    """All donors say that they do not hold the state (any more), or serve none."""


@dataclass(frozen=True)
class Holders:
    """Donors of which some are certain to have had the state, but for a minority. A fetch fails once most of these have
    no hope left, whatever others might still answer. Those of them that cannot be reached do not count."""

    known: Callable[[], Iterable[str]]
    """All donors."""
    certain: Collection[str]
    """None of them is this peer."""


class Arriving(Protocol):
    """Where the chunks of a fetch go. Its methods block."""

    @property
    def size_bytes(self) -> int:
        """Of the whole that they are chunks of."""
        ...

    @property
    def wanted_bytes(self) -> int: ...

    @property
    def chunks(self) -> frozenset[int]:
        """Those that are wanted."""
        ...

    def intact(self, tree: ChunkTree) -> set[int]:
        """Return the wanted chunks that are there already."""
        ...

    def store(self, tree: ChunkTree, index: int, data: memoryview) -> bool:
        """Keep a chunk if its hash is that in `tree`; else keep nothing and return False."""
        ...


@dataclass(frozen=True)
class KnownChunks:
    """Chunks whose hashes are known before a donor is asked, and the method that asks for one."""

    tree: ChunkTree
    method: Method[AskChunk, StateReply]
    usual_s: float | None = None
    """The seconds that such a chunk took before."""


class ChunkFetch:
    """Fetches the chunks that `part` has room for, of the state whose hash is `root`, or of what is `known`."""

    def __init__(
        self,
        rpc: Rpc,
        donors: Callable[[], Iterable[str]] | Holders,
        root: bytes,
        part: Arriving,
        events: EventLog,
        known: KnownChunks | None = None,
    ) -> None:
        """`donors()` is called again and again: peers may be added during the fetch."""
        self._rpc = rpc
        self._known, certain = (donors.known, donors.certain) if isinstance(donors, Holders) else (donors, ())
        self._root = root
        self._hashes, self._chunk = _methods(part.size_bytes, known)
        self._part = part
        self._events = events
        self._certain = frozenset(certain)
        self._tree: ChunkTree | None = None
        self._scheduler: ChunkScheduler | None = None
        self._scheduler_made = trio.Event()
        self._tells, self._what = (True, "the state") if known is None else (False, "it")
        if known is not None:
            self._schedule(known.tree, set(), known.usual_s)
        self._failure: NetworkError | ResourceError | None = None
        self._scope = trio.CancelScope()
        self.donors: dict[str, Donor] = {}
        self.resumed_bytes = 0

    async def run(self) -> ChunkTree:
        """Return the hash tree once every chunk is in `part`."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._watch, nursery)
                await self._scheduler_made.wait()
                assert self._scheduler is not None
                await self._scheduler.finished.wait()
                nursery.cancel_scope.cancel()
        if self._failure is not None:
            raise self._failure
        assert self._tree is not None
        return self._tree

    @property
    def taken_bytes(self) -> dict[str, int]:
        """Bytes taken from each donor that delivered."""
        return {donor.peer: donor.bytes for donor in self.donors.values() if donor.bytes}

    async def _watch(self, nursery: trio.Nursery) -> None:
        """Start a task for every new donor, report progress, and give up when no donor can deliver."""
        reported_at = progress_at = hopeful_at = trio.current_time()
        seen_bytes = 0
        while True:
            now = trio.current_time()
            for peer in self._known():
                if peer not in self.donors and sum(_may_deliver(d) for d in self.donors.values()) < DONORS_AT_ONCE:
                    self.donors[peer] = Donor(peer)
                    nursery.start_soon(self._use, self.donors[peer])
            taken = sum(donor.bytes for donor in self.donors.values())
            if taken != seen_bytes:
                progress_at, seen_bytes = now, taken
                if self._tells and now - reported_at >= _PROGRESS_EVERY_S:
                    reported_at = now
                    done = self.resumed_bytes + taken
                    self._events.emit(StateProgress(done_bytes=done, size_bytes=self._part.wanted_bytes))
            if any(_may_deliver(donor) for donor in self.donors.values()) and not self._most_certain_refuse():
                hopeful_at = now
            if now - hopeful_at > HOPELESS_S or self._all_refuse():
                self._give_up(self._no_donor())
            elif now - progress_at > STALL_S:
                self._give_up(
                    NetworkError(f"no donor delivered anything for {STALL_S:g} s ({self._reasons()}): {_REMEDY}")
                )
            await trio.sleep(_POLL_S)

    def _give_up(self, error: NetworkError | ResourceError) -> None:
        self._failure = error
        self._scope.cancel()

    def _most_certain_refuse(self) -> bool:
        """Return whether most of those that are certain to have had the state do not hold it any more, or refuse it.
        Peers that cannot be reached are then not waited for: the group has a newer state, which soon will be gone, too.
        One that has not answered yet may be slow, and counts against it."""
        certain = [donor for donor in self.donors.values() if donor.peer in self._certain]
        refuse = sum(donor.status in NO_HOPE for donor in certain)
        lost = sum(donor.status == "lost" for donor in certain)
        most = 2 * refuse > len(self._certain) - lost
        return refuse > 0 and most and all(d.status != "useful" for d in self.donors.values())

    def _all_refuse(self) -> bool:
        """Return whether nothing can come of waiting: all known peers refuse, or serve no states, as the authority of a
        run in which no peer trains. One that holds the state no more may be one that is about to publish it."""
        return bool(self.donors) and all(donor.status in ("none", "refused") for donor in self.donors.values())

    def _no_donor(self) -> NetworkError:
        statuses = {donor.status for donor in self.donors.values()}
        kind = StateGone if "gone" in statuses and statuses <= {"gone", "none", "bad"} else NetworkError
        return kind(f"no peer can deliver {self._what} ({self._reasons()}): {_REMEDY}")

    def _reasons(self) -> str:
        reasons: dict[DonorStatus, str] = {
            "new": "do not answer",
            "useful": "have stopped answering",
            "lost": "cannot be reached",
            "gone": "do not hold it any more",
            "refused": "refuse to serve it",
            "none": "serve no state",
            "bad": "sent wrong bytes",
        }
        statuses = [donor.status for donor in self.donors.values()]
        parts = [f"{statuses.count(s)} {text}" for s, text in reasons.items() if s in statuses]
        return ", ".join(parts) or "no donor is known"

    # -- one donor -----------------------------------------------------------------------------------------------------

    async def _use(self, donor: Donor) -> None:
        """Ask this donor for chunks as long as the fetch lasts, with a pause after each failure."""
        while not donor.banned:
            if self._scheduler is None:
                await self._ask_hashes(donor)
            if self._scheduler is not None and not donor.banned:
                async with trio.open_nursery() as nursery:
                    for _ in range(1 if donor.failures else CALLS_PER_DONOR):
                        nursery.start_soon(self._ask_chunks, donor, self._scheduler, nursery.cancel_scope)
            donor.resting = True
            gone = donor.status == "gone" and not donor.failures
            await trio.sleep(GONE_REST_S if gone else min(REST_S * donor.backoff, REST_MAX_S))
            donor.resting = False

    async def _ask_hashes(self, donor: Donor) -> None:
        """Get the list of chunk hashes from `donor`, unless another donor was faster."""
        try:
            reply = await self._rpc.call(donor.peer, self._hashes, AskHashes(self._root), timeout_s=HASHES_S)
        except (NetworkError, ProtocolViolation) as error:
            _failed(donor, error)
            return
        if reply.body.outcome == "gone":
            donor.status = "gone"
        elif self._tree is None:
            tree = StateTree.of_hashes(self._part.size_bytes, reply.payload)
            if tree is None or tree.root != self._root:
                self._penalize(donor, "sent a list of chunk hashes that does not have the hash of the state")
                return
            self._tree = tree
            self._schedule(tree, await trio.to_thread.run_sync(self._part.intact, tree))
        else:
            await self._scheduler_made.wait()

    def _schedule(self, tree: ChunkTree, intact: set[int], usual_s: float | None = None) -> None:
        self._tree = tree
        self.resumed_bytes = sum(end - start for start, end in map(tree.span, intact))
        self._scheduler = ChunkScheduler(tree, self._part.chunks - intact, usual_s=usual_s)
        self._scheduler_made.set()

    async def _ask_chunks(self, donor: Donor, scheduler: ChunkScheduler, all_calls: trio.CancelScope) -> None:
        """Make one call after the other until `donor` fails. Then its other calls end as well."""
        while True:
            ask = scheduler.take(donor, self.donors.values())
            if ask is None:
                await scheduler.changed.wait(_POLL_S)
                continue
            pause_s = 0.0
            try:
                with ask.scope:
                    pause_s = await self._ask_chunk(ask, scheduler)
            except (NetworkError, ProtocolViolation) as error:
                _failed(donor, error)
            except ResourceError as error:
                self._give_up(error)
            finally:
                scheduler.settle(ask)
            if donor.status != "useful" and not ask.scope.cancelled_caught:
                all_calls.cancel()
            await trio.sleep(pause_s)

    async def _ask_chunk(self, ask: Ask, scheduler: ChunkScheduler) -> float:
        """Ask, check, store. Return the seconds to wait before the next call to this donor."""
        donor = ask.donor
        reply: Reply[StateReply] = await self._rpc.call(
            donor.peer,
            self._chunk,
            AskChunk(self._root, ask.index),
            timeout_s=donor.deadline_s,
            bulk=True,
        )
        if reply.body.outcome == "here":
            stored = await trio.to_thread.run_sync(self._part.store, scheduler.tree, ask.index, reply.payload)
            if not stored:
                self._penalize(donor, f"sent bytes that are not chunk {ask.index} of the state")
                return 0.0
            donor.failures = 0
            scheduler.deliver(ask)
            faults.reach("during_fetch", 0)
        donor.status = "gone" if reply.body.outcome == "gone" else "useful"
        return _pause_s(reply.body.retry_after_s) if reply.body.outcome == "busy" else 0.0

    def _penalize(self, donor: Donor, reason: str) -> None:
        """Drop this donor for the rest of the fetch: one that sent wrong bytes is not asked again."""
        donor.status = "bad"
        self._events.emit(PeerPenalized(peer=donor.peer, reason=reason))


def _methods(
    size_bytes: int, known: KnownChunks | None
) -> tuple[Method[AskHashes, StateReply], Method[AskChunk, StateReply]]:
    methods = StateMethods.of(size_bytes, 0)
    return methods.hashes, methods.chunk if known is None else known.method


def _pause_s(asked_s: float) -> float:
    """Return the pause that a busy donor asks for; the longest one if that is out of bounds (it may be NaN)."""
    return max(asked_s, _POLL_S) if 0 <= asked_s <= BUSY_PAUSE_MAX_S else BUSY_PAUSE_MAX_S


def _failed(donor: Donor, error: NetworkError | ProtocolViolation) -> None:
    if isinstance(error, ProtocolViolation):
        donor.status = "bad"  # rpc has emitted the penalty
    elif isinstance(error, RemoteError) and error.code != "Busy":
        # It answers but does not serve: it is in another run, has another version, or is a coordinator; or it does not
        # let this peer in, say.
        donor.status = "none" if error.code == UNKNOWN_METHOD else "refused"
    else:
        donor.status = "lost"
    donor.failures += 1


def _may_deliver(donor: Donor) -> bool:
    return donor.status in ("new", "useful") or (donor.status == "lost" and donor.failures < HOPELESS_FAILURES)
