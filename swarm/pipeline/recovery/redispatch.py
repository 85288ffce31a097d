"""Asks the replicas of a stage for their counted samples, and those of stage 0 to dispatch the missing ones again."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final

from peer.catalogue.stages import PipelineRedispatched
from peer.errors import BarnraiseError, RemoteError
from peer.net.rpc import ask_each
from peer.net.rpc_server import BUSY
from swarm.pipeline.accounting import micro_batches_of
from swarm.pipeline.messages import COUNTED, REDISPATCH, SAMPLE_RANGES_MAX, AskCounted, Redispatch
from swarm.pipeline.source import MicroBatchSource
from swarm.pipeline.stage_server import StageServer
from swarm.protocol.ledger import Range, count, union

ANSWER_S: Final = 1.0  # a replica that takes longer is asked again
STALL_S: Final = 2.0  # without any growth, after which missing micro-batches are dispatched again
STALL_FIRST_S: Final = 10.0  # the same while the latency of a micro-batch is unknown
STALL_ANSWERS: Final = 4.0  # the same in latencies

Firsts = set[int]
"""Micro-batches, by their first samples."""


class Redispatcher:
    """Finds what is missing, for one replica. `sources()`: the live replicas of stage 0; `source`: that of this peer,
    if it is one of them."""

    def __init__(
        self, server: StageServer, sources: Callable[[], Sequence[str]], source: MicroBatchSource | None = None
    ) -> None:
        self.micro_batch: Final = server.settings.micro_batch
        self._server, self._sources, self._source = server, sources, source
        self._host, self._settings = server.host, server.settings
        self._next_source = 0

    def firsts_of(self, ranges: Iterable[Range]) -> Firsts:
        """Return the micro-batches of these ranges, which are made of whole ones."""
        return {first for first, _ in micro_batches_of(ranges, self.micro_batch)}

    def whole(self, ranges: Iterable[Range], wanted: Collection[int]) -> Firsts:
        """Return those of `wanted` that lie in `ranges`, which a peer may have made up."""
        return _inside(union(ranges), sorted(wanted), self.micro_batch)

    def counted_here(self, wanted: Collection[int]) -> Firsts:
        """Return those of `wanted` that this replica has counted."""
        return self.whole(self._server.accounting.counted, wanted)

    async def poll(
        self, group: str, epoch: int, peers: Sequence[str], have: dict[str, Firsts], wanted: Collection[int]
    ) -> None:
        """Ask replicas which of `wanted` they have counted; without an answer `have` keeps what it had."""

        def failed(peer: str, error: BarnraiseError) -> None:
            if isinstance(error, RemoteError) and error.code != BUSY:
                have.pop(peer, None)  # it has left for another stage, with all that it had

        asked = dict.fromkeys(peers, AskCounted(group, epoch))
        for peer, reply in (await ask_each(self._host.rpc, COUNTED, asked, ANSWER_S, failed)).items():
            have[peer] = self.whole(reply.ranges, wanted)

    async def redispatch(self, epoch: int, firsts: Firsts, reason: str) -> bool:
        """Have these dispatched again by the live replicas of stage 0, in rotation, except those that are in flight
        from there. Return whether any was asked for or is in flight."""
        if not firsts:
            return False
        here = {self._host.peer_id} if self._source is not None else set()
        sources = sorted({*self._sources(), *here} - set(self._host.suspects))
        missing = firsts - await self._dispatching(epoch, firsts, sources)
        ranges = [(first, first + self.micro_batch) for first in sorted(missing)]
        if not ranges or not sources:
            return len(missing) < len(firsts)
        self._host.events.emit(PipelineRedispatched(samples=count(ranges), round=epoch + 1, reason=reason))
        self._next_source += 1
        for k, peer in enumerate(sources):
            part = tuple(ranges[(k + self._next_source) % len(sources) :: len(sources)][:SAMPLE_RANGES_MAX])
            if not part:
                continue
            if peer == self._host.peer_id and self._source is not None:
                self._source.redispatch(part, epoch)
                continue
            try:
                request = Redispatch(self._settings.groups[0], epoch, part)
                await self._host.rpc.call(peer, REDISPATCH, request, timeout_s=ANSWER_S)
            except BarnraiseError as error:
                self._host.events.emit("redispatch_unanswered", peer=peer, reason=str(error))
        return True

    async def _dispatching(self, epoch: int, wanted: Firsts, sources: Sequence[str]) -> Firsts:
        """Return what the replicas of stage 0 have in flight. It will come, or is stuck like all else; another copy
        would be counted twice."""
        found = self.whole(self._source.dispatching, wanted) if self._source is not None else set()
        others = [peer for peer in sources if peer != self._host.peer_id]
        asked = dict.fromkeys(others, AskCounted(self._settings.groups[0], epoch))
        replies = await ask_each(self._host.rpc, COUNTED, asked, ANSWER_S)
        return found.union(*(self.whole(reply.dispatching, wanted) for reply in replies.values()))


def stall_s(usual_s: float) -> float:
    """Return after how many seconds without any growth what is missing is dispatched again. `usual_s`: the latency of a
    micro-batch, 0 if unknown."""
    return max(STALL_S, STALL_ANSWERS * usual_s) if usual_s else STALL_FIRST_S


def _inside(ranges: Sequence[Range], wanted: Sequence[int], size: int) -> Firsts:
    """Return those of `wanted` whose micro-batch lies in a range. Both are in order."""
    found: Firsts = set()
    at = 0
    for first in wanted:
        while at < len(ranges) and ranges[at][1] < first + size:
            at += 1
        if at < len(ranges) and ranges[at][0] <= first:
            found.add(first)
    return found
