"""One replica in its group: the node, its trainer and its weights, connected, and restored from disk after a start."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import replace

import trio

from peer.errors import BarnraiseError
from peer.events import EventLog
from swarm.protocol.agreement import events
from swarm.protocol.agreement.config import AgreementConfig
from swarm.protocol.agreement.work import Work
from swarm.protocol.head import Head, Member
from swarm.protocol.plan import WorkPlan
from swarm.rounds.building import StateBuilder
from swarm.rounds.context import RoundContext
from swarm.rounds.fetched_states import FetchedStates
from swarm.rounds.group_driver import NO_OPTIONS, DriverOptions, GroupDriver
from swarm.rounds.handlers import serve_agreement, serve_heads, serve_slices
from swarm.rounds.records import RecordFiles
from swarm.rounds.replica_actor import ReplicaActor
from swarm.rounds.result_log import LoggedResult, ResultLog, path_between, reachable
from swarm.rounds.trainers.trainer import Trainer
from swarm.state.fetch import Fetched
from swarm.state.outer_state import OuterState


class ReplicaDriver:
    """Takes part in a group's agreement with weights and a trainer. `restore_replica` opens one."""

    def __init__(self, group: GroupDriver, actor: ReplicaActor, log: ResultLog, fetched: FetchedStates) -> None:
        self.group, self.actor, self.log, self.fetched = group, actor, log, fetched
        self._context = actor.context

    @property
    def head(self) -> Head:
        """The head whose weights this replica has."""
        return self.actor.head

    @property
    def me(self) -> Member:
        return self.group.me

    @property
    def phase(self) -> str:
        """This replica's activity, for display."""
        return "catching up" if self.actor.fetching and not self.group.unsaved else self.group.phase

    @property
    def takes_part(self) -> bool:
        """Whether this peer is a member of the group or a learner, or the present plan takes it in."""
        head, plan = self.head, self.actor.training.plan
        learns = any(learner.member == self.me for learner in head.learners)
        return head.has(self.me) or learns or (plan is not None and plan.of(self.me) is not None)

    async def until_round(self, number: int) -> None:
        """Wait until this replica has committed that round, or a later one, and `listener.committed` has returned."""
        while self.actor.told.round < number or self.head.state_hash != self._context.state.tree.root:
            await self.actor.committed.wait(1.0)

    async def run(self) -> None:
        """Take part until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self.group.run, self.actor)
            if self._context.schedule.synchronous:
                plan = lambda: self.actor.training.plan  # noqa: E731
                nursery.start_soon(gather_batches, self.group, self._context.trainer, plan)

    def checkpointed(self, head: Head, base: bytes) -> None:
        """Delete the files that led to a head now covered by a checkpoint on disk; `base`: `fetched.base` when it was
        begun. Blocks."""
        self.log.drop(head.round)
        self.fetched.release(base)


async def restore_replica(
    context: RoundContext,
    config: AgreementConfig,
    work: Work,
    known_peers: Callable[[], Iterable[str]],
    options: DriverOptions = NO_OPTIONS,
) -> ReplicaDriver:
    """Return a replica that stands where its disk leads. It answers other peers from now on. The node comes first: its
    records say to which state the results on disk have to lead."""
    host, state = context.host, context.state
    log = ResultLog(context.folder / "results")
    fetched = FetchedStates(context.folder, state.size_bytes, len(state.tensors))
    found = DiskStates(state, log, fetched, host.events)
    await trio.to_thread.run_sync(found.load)
    records, options = RecordFiles(context.folder / "agreement"), replace(options, states=found.hashes)
    group = GroupDriver(host, config, work, records, context.timeouts, known_peers, options)
    context = replace(context, me=group.me)
    builder = StateBuilder(context, log)
    for missing in await found.restore(group.head, builder):
        group.feed(events.StateFetched(missing, False))
    round_info = context.schedule.round_info(group.head)
    coding = await trio.to_thread.run_sync(state.strategy.coding, round_info, state.tensors)
    builder.publish(group.head)
    actor = ReplicaActor(context, group.head, coding, builder, fetched, group)
    serve_slices(host.rpc, actor)
    serve_agreement(host.rpc, lambda: {group.group: group})
    serve_heads(host.rpc, lambda: {group.group: group})
    return ReplicaDriver(group, actor, log, fetched)


async def gather_batches(
    group: GroupDriver, trainer: Trainer, plan: Callable[[], WorkPlan | None], until_s: float = 1.0
) -> None:
    """Ask the trainers of a synchronous pipeline, while this peer leads, whether together they have counted the whole
    batch, and report to the node, which decides what follows (`swarm.protocol.claims`). They are asked once a plan, and
    again if another peer has led in between. Runs until cancelled."""
    told = b""

    def current() -> WorkPlan | None:
        mine = plan()
        return mine if mine is not None and group.phase == "leading" and mine.head == group.head.hash else None

    async def ask(mine: WorkPlan, peers: list[str], scope: trio.CancelScope) -> None:
        nonlocal told
        claims = await trainer.gather(peers)
        told = mine.hash
        group.feed(events.Gathered(mine.head, {peer: tuple(own) for peer, own in (claims or {}).items()}))
        scope.cancel()

    while True:
        mine = current()
        if mine is None or mine.hash == told:
            await group.changed.wait(until_s)
            continue
        peers = group.workers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, mine, peers, nursery.cancel_scope)
            while (now := current()) is not None and now.hash == mine.hash:
                peers[:] = group.workers  # a newcomer may bring samples that no other will count
                await group.changed.wait(until_s)
            nursery.cancel_scope.cancel()


class DiskStates:
    """The states that a disk holds: the checkpoint, which `state` was loaded from, those that were fetched whole, and
    those that results lead to from these. A result that is damaged is forgotten, with an event."""

    def __init__(self, state: OuterState, log: ResultLog, fetched: FetchedStates, events: EventLog) -> None:
        self._state, self._log, self._fetched, self._events = state, log, fetched, events
        self._results: dict[bytes, LoggedResult] = {}  # by the state that they lead to; unchecked
        self._whole: Sequence[Fetched] = ()

    def load(self) -> None:
        """Look what is there. Blocks."""
        self._results, self._whole = self._log.load(), self._fetched.load(self._events)

    @property
    def hashes(self) -> list[bytes]:
        bases = [self._state.tree.root, *(one.tree.root for one in self._whole)]
        return list(dict.fromkeys(name for base in bases for name in reachable(self._results, base)))

    async def restore(self, head: Head, builder: StateBuilder) -> list[bytes]:
        """Bring the state to that of `head`, as far as results lead there, from the checkpoint or one of the states
        that were fetched whole. Offer those that come next. Return the states that are not here after all."""
        state, results, whole = self._state, self._results, self._whole
        told, logged = self.hashes, len(results)
        for base in (None, *whole):
            root = state.tree.root if base is None else base.tree.root
            path = path_between(results, root, head.state_hash)
            if root != head.state_hash and not path:
                continue
            if base is not None:
                state.replace(base.tensors, base.tree)
                self._fetched.base = root
            for result in path:
                if not await self._is_whole(result, builder.advance):
                    break
            if state.tree.root == head.state_hash:
                break
        for result in list(results.values()):
            if result.before.state_hash == state.tree.root == head.state_hash:
                await self._is_whole(result, builder.follow)
        ahead = next((one for one in whole if one.tree.root not in (self._fetched.base, state.tree.root)), None)
        if ahead is not None:
            builder.offer_fetched(ahead)
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
        del self._results[result.leads_to]
        return False
