"""Actions that a replica performs for its node: train, merge, build, fetch and commit."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Final, Protocol

import trio

from optim.strategies.interface import Coding
from peer.catalogue.rounds import PhaseEntered
from peer.errors import RoundDiscarded
from peer.machine import free_memory_bytes
from peer.notifier import Notifier
from swarm.protocol.agreement import actions, events
from swarm.protocol.agreement.rules.opened_roster import OpenedRoster
from swarm.protocol.head import Head
from swarm.protocol.plan import Contribution
from swarm.protocol.shares import room_code
from swarm.rounds.building import StateBuilder
from swarm.rounds.catch_up import CatchUp
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange.audits import Audits
from swarm.rounds.exchange.loss_checks import LossChecks
from swarm.rounds.exchange.merge_order import MergeOrder
from swarm.rounds.exchange.round_slices import RoundSlices
from swarm.rounds.exchange.slice_exchange import SliceExchange
from swarm.rounds.fetched_states import FetchedStates
from swarm.rounds.group_driver import GroupDriver
from swarm.rounds.training import Training

EXCHANGES_MAX: Final = 4  # the latest, whose results other peers may fetch
FREE_SHARE: Final = 0.5  # of the free memory, for merging: other programs want some, too
LINGER_S: Final = 20.0  # after a commit, to serve slower peers the slices that they lack


class CommitListener(Protocol):
    """Hears of commits, and says which peers may have a state (`swarm.training.replica`)."""

    async def committed(self, head: Head, merged: Sequence[Contribution] | None) -> None:
        """Take note that `head` is committed: `merged` are the contributions in it; None where its state was
        fetched."""

    def donors(self, head: Head) -> Iterable[str]:
        """Return the peers that report this head as theirs."""


class ReplicaActor:
    """The actor of one replica."""

    def __init__(
        self,
        context: RoundContext,
        head: Head,
        coding: Coding,
        builder: StateBuilder,
        fetched: FetchedStates,
        group: GroupDriver,
    ) -> None:
        """`head`: where the replica stands; `coding`: of the round after it. `group`: its node."""
        feed = group.feed
        self.listener: CommitListener | None = None
        self.head, self.coding = head, coding
        self.told = head
        """The last head that was passed to `listener.committed`."""
        self.context = context
        self.builder = builder
        self.training = Training(context, feed)
        self.catch_up = CatchUp(context, self.builder, fetched, self._donors, feed)
        self.audits = Audits(context, group.leave_out)
        self._loss_checks = LossChecks(context, self.audits, context.state.strategy.check_by_loss, feed)
        self.began = Notifier()
        """Notified when an exchange begins."""
        self.committed = Notifier()
        """Notified once a head's weights have arrived."""
        self.fetching = 0
        """States on their way here."""
        self.exchanges: OrderedDict[bytes, SliceExchange] = OrderedDict()
        self._feed, self._fetched, self._group = feed, fetched, group
        self._slices = RoundSlices()
        context.timeouts.update_bytes = self._update_bytes()

    async def perform(self, action: actions.Action, tasks: trio.Nursery) -> None:
        """Carry out an action, or begin to."""
        match action:
            case actions.Train():
                self.training.begin(action.plan, self.head, self.coding, action.finish_early, tasks)
            case actions.StopTraining():
                self.training.stop(action.reason)
                self._slices = RoundSlices()
            case actions.MergeSlices():
                self._merge(action.roster, tasks)
            case actions.Build():
                tasks.start_soon(self._build, action, self.head)
            case actions.Fetch():
                tasks.start_soon(self._fetch, action)
            case actions.CommitHead():
                await self._commit(action, tasks)
            case _:
                raise TypeError(f"no replica can carry out {type(action).__name__}")

    async def _fetch(self, action: actions.Fetch) -> None:
        self.fetching += 1
        try:
            ok = await self.catch_up.fetch(action, self.head, self._moved)
        finally:
            self.fetching -= 1
        state = self.context.state
        if ok and action.state_hash == self.head.state_hash != state.tree.root:  # of the head where the node stands
            await self._stand_at(self.head, None, [])
        self._feed(events.StateFetched(action.state_hash, ok))

    async def _moved(self, state_hash: bytes, timeout_s: float) -> Head:
        await self.committed.until(lambda: self.head.state_hash == state_hash, timeout_s)
        return self.head

    def _donors(self, head: Head) -> Iterable[str]:
        return self.listener.donors(head) if self.listener is not None else ()

    # -- exchange ------------------------------------------------------------------------------------------------------

    def _merge(self, roster: OpenedRoster, tasks: trio.Nursery) -> None:
        for exchange in self.exchanges.values():
            exchange.scope.cancel()
        exchange = self._exchange(roster)
        owned = exchange.owners.count(self.context.me.peer)
        self.context.events.emit(PhaseEntered(round=self.head.round + 1, phase="exchange", owned=owned))
        self.context.links.begin(exchange.order.peers, exchange.owners, [m.peer for m in self.head.members])
        tasks.start_soon(exchange.run)
        tasks.start_soon(self._build_ahead, exchange, self.head)

    def _exchange(self, roster: OpenedRoster, takes_part: bool = True) -> SliceExchange:
        bundles = self.context.schedule.bundles(self.coding.count)
        order = MergeOrder(roster, self.head, self.context.schedule.round_info(self.head), self.coding, bundles)
        update, mine = self.training.update, list[memoryview]()
        hashes = bundles.hashes(update.hashes) if update is not None else ()
        # Its contribution may be of a process before this.
        if update is not None and any(body.hashes == hashes for body in order.merged):
            self._slices.list_own(bundles, update.hashes)
            mine = list(update.slices)
        timeout_s = self.context.timeouts.exchange_s(self.context.timeouts.exchange_bytes)
        exchange = SliceExchange(self.context, order, mine, self._slices, timeout_s, self._feed, takes_part)
        self.exchanges[order.key] = exchange
        while len(self.exchanges) > EXCHANGES_MAX:
            self.exchanges.popitem(last=False)[1].scope.cancel()
        self.began.notify()
        return exchange

    async def _build_ahead(self, exchange: SliceExchange, head: Head) -> None:
        candidate = await self.builder.build_ahead(exchange)
        if candidate is not None and head is self.head:
            self._built(exchange, candidate.name, candidate.result.leads_to)

    async def _build(self, action: actions.Build, head: Head) -> None:
        exchange = self.exchanges.get(action.roster.key) or self._exchange(action.roster, takes_part=False)
        candidate = await self.builder.build(exchange, action.results, action.holders)
        if head is self.head:
            self._built(exchange, action.name, candidate.result.leads_to if candidate is not None else None)

    def _built(self, exchange: SliceExchange, name: bytes, state_hash: bytes | None) -> None:
        if state_hash is not None and not exchange.is_built:
            exchange.is_built = True
            self._measure()
            self.context.timeouts.note_exchange(trio.current_time() - exchange.began_at)
            self.context.events.emit(PhaseEntered(round=self.head.round + 1, phase="vote"))
        self._feed(events.Built(exchange.order.key, name, state_hash))

    def _measure(self) -> None:
        """Tell the node what the exchange shows of links, and how much this peer has room to merge."""
        links = self.context.links
        links.end()
        if self.context.schedule.by_link and links.codes:
            free_bytes = FREE_SHARE * free_memory_bytes()
            room = room_code(free_bytes, self._update_bytes()[0], len(self.head.members))
            self._feed(events.LinksMeasured(links.codes | {self.context.me.peer: bytes((room, 0))}))

    def _update_bytes(self) -> tuple[int, int]:
        """Return the bytes of an update and of its result."""
        members, slices = max(1, len(self.head.members)), range(self.coding.count)
        return sum(map(self.coding.message_bytes, slices)), sum(self.coding.result_bytes(i, members) for i in slices)

    async def exchange_named(self, key: bytes, sender: str) -> SliceExchange:
        """Return an exchange; wait for its roster if a slice was faster. Raises `RoundDiscarded`."""
        plan = self.training.plan
        known = key in self.exchanges or any(m.peer == sender for m in self.head.members)
        if not known and (plan is None or all(a.member.peer != sender for a in plan.assignments)):
            raise RoundDiscarded("the sender of a slice has no part in this round")  # hold no memory for other peers
        await self.began.until(lambda: key in self.exchanges, self.context.timeouts.answer_s)
        if key not in self.exchanges:
            raise RoundDiscarded("that attempt is over or has not begun here")
        return self.exchanges[key]

    # -- commit --------------------------------------------------------------------------------------------------------

    async def _commit(self, action: actions.CommitHead, tasks: trio.Nursery) -> None:
        head, before = action.head, self.head
        bodies = self._bodies(action)
        candidate = self.builder.candidate(head.state_hash) if bodies is not None else None
        result = candidate.result if candidate is not None else None
        self.training.settle(self._is_merged(before, head, bodies))
        for exchange in self.exchanges.values():
            exchange.scope.deadline = min(exchange.scope.deadline, trio.current_time() + LINGER_S)
        self._slices = RoundSlices()
        merged_in = self.exchanges.get(result.key) if result is not None and result.parts else None
        drawn = await self._loss_checks.draw(merged_in, head) if merged_in is not None else None
        await self._stand_at(head, bodies, list(result.parts) if result is not None else [])
        tasks.start_soon(self.builder.prepare)
        if result is not None and merged_in is not None:
            if drawn is not None:
                tasks.start_soon(self._loss_checks.check, drawn)
            self.audits.remember(merged_in, result.parts)
            tasks.start_soon(merged_in.put_away, result.parts, self.builder.spool)
            tasks.start_soon(self.audits.audit, result.key, head)

    async def _stand_at(self, head: Head, bodies: Sequence[Contribution] | None, parts: list[memoryview]) -> None:
        """Make the state of that head the committed one, and report it. A peer that exits meanwhile saves that state,
        so it reports it first: if all members exit at once, no other peer does."""
        goal = self._group.head.state_hash  # a state may have been fetched while the record of this head was written
        await self.builder.commit(head, goal, parts)
        self.head = head
        try:
            with trio.CancelScope(shield=True):
                await self._fetched.committed(head.state_hash, goal)
            await self._recode()
        finally:
            with trio.CancelScope(shield=True):
                if self.listener is not None:
                    await self.listener.committed(head, bodies)
                self.told = head
        self.committed.notify()

    async def _recode(self) -> None:
        """Find out how the updates of the next round are coded. This takes a while if it depends on the state, and ends
        soon if it is cancelled: a peer that ends has no next round."""
        state, round_info = self.context.state, self.context.schedule.round_info(self.head)
        check = trio.from_thread.check_cancelled
        self.coding = await trio.to_thread.run_sync(state.strategy.coding, round_info, state.tensors, check)
        self.context.timeouts.update_bytes = self._update_bytes()

    def _bodies(self, action: actions.CommitHead) -> list[Contribution] | None:
        """Return the contributions that a commit has merged; None where its state was fetched, so that they are not
        known here."""
        candidate = self.builder.candidate(action.head.state_hash)
        order = candidate.order if candidate is not None else None
        if order is None and action.exchange in self.exchanges:
            order = self.exchanges[action.exchange].order
        return order.merged if order is not None and action.head.round == self.head.round + 1 else None

    def _is_merged(self, before: Head, head: Head, bodies: Sequence[Contribution] | None) -> bool:
        """Return whether this peer's update is in the commit. Where that cannot be known it counts as merged, so that
        no sample enters the weights twice."""
        me = self.context.me
        if bodies is not None:
            return any(body.member == me for body in bodies)
        if head.previous != before.hash:
            return True
        return all(absence.member != me for absence in head.absent)

    async def save(self, state_hash: bytes) -> None:
        """Put on disk what leads to that state. Raises ResourceError."""
        await self.builder.save(state_hash)
