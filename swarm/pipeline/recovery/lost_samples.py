"""Samples that a later stage has lost and the first one merged: requested again, and accounted for at the end.

A replica that dies, or is left out of a roster, loses the samples counted since its last commit. Stage 0 has merged
those samples, so it dispatches them only if it is asked to; a stage that has merged them passes them through.

    in a round      samples that two heads in a row have returned; one member asks, in turn
    at the end      all that stage 0's last head has settled and this stage has not; what does not come then is lost
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from typing import Final

import trio

from swarm.pipeline.recovery.redispatch import Firsts, Redispatcher, stall_s
from swarm.pipeline.stage_server import StageServer
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range, common
from swarm.protocol.receipts import StageProof

POLL_S: Final = 0.2
SETTLE_S: Final = 1.0  # after a commit: the other replicas commit it a moment later
WANTED_MAX: Final = 4096  # micro-batches that are looked for at once
ASKS_MAX: Final = 2  # in a row without any growth, after which what is missing is given up
TURN_STALLS: Final = 2.0  # stalls after which the next member asks, too


class LostSamples:
    """The lost samples of one replica's group. `replicas()`: the live ones of its stage, by their records."""

    def __init__(
        self,
        server: StageServer,
        redispatcher: Redispatcher,
        replicas: Callable[[], Iterable[str]],
        rounds: int,
    ) -> None:
        """`rounds`: how many the run has, 0 if it has no end."""
        self.first_stage: StageProof = ()
        """The proof of stage 0's last head, once it has arrived."""
        self._server, self._redispatcher, self._replicas = server, redispatcher, replicas
        self._rounds = rounds
        self._host = server.host

    async def look_for_the_end(self) -> None:
        """Ask for the last head of stage 0, which says that it has made it."""
        proof = await self._server.prove(0)
        if proof and proof[-1].head.round >= self._rounds:
            self.first_stage = proof

    async def ask_for_overdue(self, head: Head, before: Head) -> None:
        """Have dispatched again what the group has not merged in two commits and no replica has counted, if it is this
        peer's turn."""
        alive = self._alive(head)
        overdue = common(head.ledger.returned, before.ledger.returned)
        if not overdue or not alive or alive[head.round % len(alive)] != self._host.peer_id:
            return
        await trio.sleep(SETTLE_S)
        wanted = self._first(overdue)
        have = await self._ask(head, {}, wanted)
        await self._redispatcher.redispatch(head.round, wanted.difference(*have.values()), "lost by this stage")

    async def until_settled(self, head: Head) -> None:
        """In the last round, wait until the replicas together have counted what stage 0 has settled and this stage has
        not. Have missing ones dispatched again; return as well when no more of them come."""
        wanted = self._first(common(self.first_stage[-1].head.ledger.settled, head.ledger.free))
        have: dict[str, Firsts] = {}
        counted: Firsts = set()
        asks, began = 0, trio.current_time()
        quiet_from = began  # the last growth or question
        while not wanted <= counted:
            before, have = counted, await self._ask(head, have, wanted)
            counted, now = set().union(*have.values()), trio.current_time()
            if not counted <= before:
                quiet_from, asks = now, 0
            quiet_s = stall_s(self._server.runner.answer_s)
            alive = self._alive(head)
            turn = alive.index(self._host.peer_id) if self._host.peer_id in alive else len(alive)
            first = quiet_from == began and have.keys() >= set(self._others(head))  # nothing is in flight yet
            if now - quiet_from >= TURN_STALLS * turn * quiet_s + (0.0 if first else quiet_s):
                if asks == ASKS_MAX:
                    return
                asks, quiet_from = asks + 1, now
                await self._redispatcher.redispatch(head.round, wanted - counted, "lost by this stage")
            await trio.sleep(POLL_S)

    async def _ask(self, head: Head, have: dict[str, Firsts], wanted: Firsts) -> dict[str, Firsts]:
        """Return which of `wanted` each live replica has counted."""
        have = {peer: firsts for peer, firsts in have.items() if peer not in self._host.suspects}
        have[self._host.peer_id] = self._redispatcher.counted_here(wanted)
        await self._redispatcher.poll(head.run_id, head.round, self._others(head), have, wanted)
        return have

    def _alive(self, head: Head) -> list[str]:
        return [member.peer for member in head.members if member.peer not in self._host.suspects]

    def _others(self, head: Head) -> Sequence[str]:
        """Return all that may have counted anything: replicas by their records, and members that are about to leave."""
        learners = (learner.member.peer for learner in head.learners)
        there = {*self._alive(head), *learners, *self._replicas()} - {self._host.peer_id, *self._host.suspects}
        return sorted(there)

    def _first(self, ranges: Iterable[Range]) -> Firsts:
        """Return the first micro-batches in `ranges`."""
        size = self._redispatcher.micro_batch
        return set(islice((at for first, end in ranges for at in range(first, end, size)), WANTED_MAX))
