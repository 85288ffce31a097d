"""Bringing a replica's state to where its node stands, after a start: from the checkpoint, by what else is on disk."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import trio

from peer.errors import BarnraiseError
from peer.events import EventLog
from swarm.protocol.head import Head
from swarm.rounds.building import StateBuilder
from swarm.rounds.fetched_states import FetchedStates
from swarm.rounds.result_log import LoggedResult, ResultLog, path_between, reachable
from swarm.state.fetch import Fetched
from swarm.state.outer_state import OuterState


@dataclass(frozen=True)
class DiskStates:
    """The states that a disk holds: the checkpoint, which `state` was loaded from, those that were fetched whole, and
    those that results lead to from these."""

    state: OuterState
    results: dict[bytes, LoggedResult]
    """By the state that they lead to."""
    whole: Sequence[Fetched]

    @property
    def hashes(self) -> list[bytes]:
        bases = [self.state.tree.root, *(one.tree.root for one in self.whole)]
        return list(dict.fromkeys(name for base in bases for name in reachable(self.results, base)))


async def load_states(state: OuterState, log: ResultLog, fetched: FetchedStates, events: EventLog) -> DiskStates:
    """Return what the disk holds, unchecked but for the states that were fetched whole."""
    results = await trio.to_thread.run_sync(log.load)
    return DiskStates(state, results, await trio.to_thread.run_sync(fetched.load, events))


class Restorer:
    """Applies what was found on disk. A result that is damaged is forgotten, with an event."""

    def __init__(
        self, found: DiskStates, builder: StateBuilder, log: ResultLog, fetched: FetchedStates, events: EventLog
    ) -> None:
        self._found, self._builder, self._log, self._fetched, self._events = found, builder, log, fetched, events

    async def restore(self, head: Head) -> list[bytes]:
        """Bring the state to that of `head`, as far as results lead there, from the checkpoint or one of the states
        that were fetched whole. Offer those that come next. Return the states that are not here after all."""
        state, results, whole = self._found.state, self._found.results, self._found.whole
        told, logged = self._found.hashes, len(results)
        for base in (None, *whole):
            root = state.tree.root if base is None else base.tree.root
            path = path_between(results, root, head.state_hash)
            if root != head.state_hash and not path:
                continue
            if base is not None:
                state.replace(base.tensors, base.tree)
                self._fetched.base = root
            for result in path:
                if not await self._is_whole(result, self._builder.advance):
                    break
            if state.tree.root == head.state_hash:
                break
        for result in list(results.values()):
            if result.before.state_hash == state.tree.root == head.state_hash:
                await self._is_whole(result, self._builder.follow)
        ahead = next((one for one in whole if one.tree.root not in (self._fetched.base, state.tree.root)), None)
        if ahead is not None:
            self._builder.offer_fetched(ahead)
        here = {*reachable(results, state.tree.root), *([ahead.tree.root] if ahead is not None else [])}
        return [name for name in told if name not in here] if whole or len(results) < logged else []

    async def _is_whole(self, result: LoggedResult, apply: Callable[[LoggedResult], Awaitable[bool]]) -> bool:
        """Apply a result; return whether it leads to what it names."""
        try:
            if await apply(result):
                return True
            reason = "they lead to another state than they name"
        except BarnraiseError as error:
            reason = str(error)
        self._events.emit("results_damaged", round=result.before.round + 1, reason=reason)
        await trio.to_thread.run_sync(self._log.forget, result.leads_to)
        del self._found.results[result.leads_to]
        return False
