"""The joiner's side of state transfer: one state, from several donors at once, not a byte of it believed.

The hash of the state comes from a quorum (`swarm.protocol.quorum`). The list of chunk hashes is checked against it,
and each chunk against the list before it is written. A donor may be slow, freeze, die, be busy, or lie: its
chunks go back to the others (`swarm.state.chunk_scheduler`), and the fetch ends when the fast donors are done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio
from torch import Tensor

from peer import faults
from peer.checkpoint.hash_tree import StateTree, hash_state
from peer.errors import NetworkError, ProtocolViolation, RemoteError, ResourceError
from peer.events import EventLog
from peer.net.rpc import Reply, Rpc
from peer.net.rpc_server import UNKNOWN_METHOD
from swarm.state.chunk_scheduler import Ask, ChunkScheduler, Donor, HeadReport
from swarm.state.messages import AskChunk, AskHashes, StateMethods, StateReply
from swarm.state.partial_file import PartFile

CALLS_PER_DONOR: Final = 3  # hides the round trip of a fast link without queueing much on a slow one
DONORS_AT_ONCE: Final = 8  # times CALLS_PER_DONOR times 4 MiB: what a fetch costs in memory
MANIFEST_S: Final = 10.0
BUSY_PAUSE_MAX_S: Final = 5.0
REST_S: Final = 0.5
REST_MAX_S: Final = 8.0
HOPELESS_S: Final = 1.5
HOPELESS_FAILURES: Final = 4
STALL_S: Final = 60.0
_POLL_S: Final = 0.1
_PROGRESS_EVERY_S: Final = 1.0


class StateGone(NetworkError):
    """All donors that could be reached answer that they do not hold the state (any more)."""


@dataclass(frozen=True)
class Fetched:
    """A state that arrived whole. `tensors`: flat fp32, each of shape (P,); `tree` is theirs.

    `donors`: bytes taken from each; `resumed_bytes`: what an earlier attempt had left.
    """

    tensors: tuple[Tensor, ...]
    tree: StateTree
    donors: dict[str, int]
    resumed_bytes: int
    seconds: float


async def fetch_state(
    rpc: Rpc,
    donors: Callable[[], Iterable[str]],
    root: bytes,
    size_bytes: int,
    part_file: Path,
    events: EventLog,
    vectors: int = 2,
) -> Fetched:
    """Fetch the state whose hash is `root`, `vectors` vectors of one length. `donors()` is asked again and again:
    peers may be added on the way.

    Verified chunks stay in `part_file` if this fails or is cancelled, and the next attempt goes on from them; it is
    removed at success, and when nobody holds that state any more. Raises NetworkError if no donor has the state (any
    more) or none delivers for a minute, and ResourceError if the disk is full or read-only. Events: state_progress,
    peer_struck.
    """
    started = trio.current_time()
    part = await trio.to_thread.run_sync(PartFile, part_file, size_bytes)
    try:
        fetch = _Fetch(rpc, donors, root, size_bytes, part, events)
        tree = await fetch.run()
        flat = await trio.to_thread.run_sync(part.load)
        tensors = flat.chunk(vectors)
        arrived = await trio.to_thread.run_sync(hash_state, tensors)
        part.discard()
        if arrived.root != root:
            raise ResourceError(f"{part_file} reads back other bytes than were written: check that disk.")
    except StateGone:
        part.discard()
        raise
    finally:
        part.close()
    taken = {donor.peer: donor.bytes for donor in fetch.donors.values() if donor.bytes}
    return Fetched(tensors, tree, taken, fetch.resumed_bytes, trio.current_time() - started)


class _Fetch:
    """The tasks of one fetch: one per donor with a few calls under way each, and one that watches over
    them."""

    def __init__(
        self,
        rpc: Rpc,
        donors: Callable[[], Iterable[str]],
        root: bytes,
        size_bytes: int,
        part: PartFile,
        events: EventLog,
    ) -> None:
        self._rpc = rpc
        self._known = donors
        self._root = root
        self._size_bytes = size_bytes
        self._methods = StateMethods.of(size_bytes, 0)
        self._part = part
        self._events = events
        self._tree: StateTree | None = None
        self._scheduler: ChunkScheduler | None = None
        self._scheduler_made = trio.Event()
        self._failure: NetworkError | ResourceError | None = None
        self._scope = trio.CancelScope()
        self.donors: dict[str, Donor] = {}
        self.resumed_bytes = 0

    async def run(self) -> StateTree:
        """Returns when every chunk is in the part file."""
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

    async def _watch(self, nursery: trio.Nursery) -> None:
        """Put every donor that turns up to work, report progress, and give up when there is no hope."""
        reported_at = progress_at = hopeful_at = trio.current_time()
        seen_bytes = 0
        while True:
            now = trio.current_time()
            for peer in self._known():
                if peer not in self.donors and sum(_is_hope(d) for d in self.donors.values()) < DONORS_AT_ONCE:
                    self.donors[peer] = Donor(peer)
                    nursery.start_soon(self._employ, self.donors[peer])
            taken = sum(donor.bytes for donor in self.donors.values())
            if taken != seen_bytes:
                progress_at, seen_bytes = now, taken
                if now - reported_at >= _PROGRESS_EVERY_S:
                    reported_at = now
                    done = self.resumed_bytes + taken
                    self._events.emit("state_progress", done_bytes=done, size_bytes=self._size_bytes)
            if any(_is_hope(donor) for donor in self.donors.values()):
                hopeful_at = now
            if now - hopeful_at > HOPELESS_S or self._is_in_vain():
                self._give_up(self._hopeless())
            elif now - progress_at > STALL_S:
                self._give_up(NetworkError(f"No donor delivered anything for {STALL_S:g} s: {self._excuses()}."))
            await trio.sleep(_POLL_S)

    def _give_up(self, error: NetworkError | ResourceError) -> None:
        self._failure = error
        self._scope.cancel()

    def _is_in_vain(self) -> bool:
        """Whether only peers are known that lend no states, as the authority of a run where nobody trains."""
        return bool(self.donors) and all(donor.report == "none" for donor in self.donors.values())

    def _hopeless(self) -> NetworkError:
        head_reports = {donor.report for donor in self.donors.values()}
        kind = StateGone if "gone" in head_reports and head_reports <= {"gone", "none", "bad"} else NetworkError
        return kind(f"No peer can deliver the state: {self._excuses()}.")

    def _excuses(self) -> str:
        corpus: dict[HeadReport, str] = {
            "new": "do not answer",
            "useful": "have stopped answering",
            "lost": "cannot be reached",
            "gone": "do not hold it any more",
            "none": "lend no state",
            "bad": "sent wrong bytes",
        }
        head_reports = [donor.report for donor in self.donors.values()]
        parts = [f"{head_reports.count(s)} {text}" for s, text in corpus.items() if s in head_reports]
        return ", ".join(parts) or "no donor is known"

    # -- one donor -----------------------------------------------------------------------------------------------------

    async def _employ(self, donor: Donor) -> None:
        """Take what this donor gives, for as long as the fetch lasts, with a pause after each failure."""
        while not donor.banned:
            if self._scheduler is None:
                await self._ask_manifest(donor)
            if self._scheduler is not None and not donor.banned:
                async with trio.open_nursery() as nursery:
                    for _ in range(1 if donor.failures else CALLS_PER_DONOR):
                        nursery.start_soon(self._ask_chunks, donor, self._scheduler, nursery.cancel_scope)
            donor.resting = True
            await trio.sleep(min(REST_S * donor.backoff, REST_MAX_S))
            donor.resting = False

    async def _ask_manifest(self, donor: Donor) -> None:
        """Learn from `donor` which chunks there are, unless another one was faster."""
        try:
            reply = await self._rpc.call(
                donor.peer, self._methods.manifest, AskHashes(self._root), timeout_s=MANIFEST_S
            )
        except (NetworkError, ProtocolViolation) as error:
            _failed(donor, error)
            return
        if reply.body.outcome == "gone":
            donor.report = "gone"
        elif self._tree is None:
            tree = StateTree.of_hashes(self._size_bytes, reply.payload)
            if tree is None or tree.root != self._root:
                self._strike(donor, "sent a list of chunk hashes that does not have the hash of the state")
                return
            self._tree = tree
            intact = await trio.to_thread.run_sync(self._part.intact, tree)
            self.resumed_bytes = sum(end - start for start, end in map(tree.span, intact))
            self._scheduler = ChunkScheduler(tree, set(range(len(tree.hashes))) - intact)
            self._scheduler_made.set()
        else:
            await self._scheduler_made.wait()

    async def _ask_chunks(self, donor: Donor, scheduler: ChunkScheduler, all_calls: trio.CancelScope) -> None:
        """One call after the other, until `donor` fails: then its other calls end as well."""
        while True:
            ask = scheduler.take(donor, self.donors.values())
            if ask is None:
                await scheduler.wait_change(_POLL_S)
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
            if donor.report != "useful" and not ask.scope.cancelled_caught:
                all_calls.cancel()
            await trio.sleep(pause_s)

    async def _ask_chunk(self, ask: Ask, scheduler: ChunkScheduler) -> float:
        """Ask, check, store. Seconds to wait before this donor is asked again."""
        donor = ask.donor
        reply: Reply[StateReply] = await self._rpc.call(
            donor.peer,
            self._methods.chunk,
            AskChunk(self._root, ask.index),
            timeout_s=donor.deadline_s,
            bulk=True,
        )
        if reply.body.outcome == "here":
            stored = await trio.to_thread.run_sync(self._part.store, scheduler.tree, ask.index, reply.payload)
            if not stored:
                self._strike(donor, f"sent bytes that are not chunk {ask.index} of the state")
                return 0.0
            donor.failures = 0
            scheduler.deliver(ask)
            faults.reach("during_fetch", 0)
        donor.report = "gone" if reply.body.outcome == "gone" else "useful"
        return _pause_s(reply.body.retry_after_s) if reply.body.outcome == "busy" else 0.0

    def _strike(self, donor: Donor, reason: str) -> None:
        """Drop this donor for the rest of the fetch: who sends wrong bytes once is not asked twice."""
        donor.report = "bad"
        self._events.emit("peer_penalized", peer=donor.peer, reason=reason)


def _pause_s(asked_s: float) -> float:
    """A busy donor's wish, within reason; anything odd (it may be NaN) counts as the longest pause."""
    return max(asked_s, _POLL_S) if 0 <= asked_s <= BUSY_PAUSE_MAX_S else BUSY_PAUSE_MAX_S


def _failed(donor: Donor, error: NetworkError | ProtocolViolation) -> None:
    if isinstance(error, ProtocolViolation):
        donor.report = "bad"  # rpc has emitted the strike
    elif isinstance(error, RemoteError) and error.code != "Busy":
        # It answers, but will not serve us: another run, another version, or a coordinator.
        donor.report = "none" if error.code == UNKNOWN_METHOD else "gone"
    else:
        donor.report = "lost"
    donor.failures += 1


def _is_hope(donor: Donor) -> bool:
    return donor.report in ("new", "useful") or (donor.report == "lost" and donor.failures < HOPELESS_FAILURES)
