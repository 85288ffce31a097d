"""Leading one attempt of a round: promises -> plan -> contributions -> roster -> a decision, or `AttemptFailed`.

Any member may come to lead; which one, and when, follows from the head (`Head.leader`). A leader decides nothing that
the others could not check: it collects, orders and repeats. It holds no lock, so that its death costs a few seconds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median_low
from typing import Any, Final

import msgspec
import trio

from peer.errors import BarnraiseError, ProtocolViolation, RoundDiscarded
from peer.identity import Signed, open_body, sign_body
from swarm.protocol.exclusion import choose_excluded
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import contains
from swarm.protocol.messages import (
    FINISH,
    PREPARE,
    START_EXCHANGE,
    START_ROUND,
    Finish,
    Prepare,
    Promise,
    StartExchange,
    StartRound,
)
from swarm.protocol.overlaps import covers_batch, select_disjoint
from swarm.protocol.paxos import Accepted, value_to_finish
from swarm.protocol.plan import PLAN_KIND, Roster, WorkPlan, check_plan, make_plan, share_slices, fit_roster
from swarm.rounds.collect import AttemptFailed, ContributionCollector, Submission
from swarm.rounds.round import Round
from swarm.rounds.trainer import Claims

JOINER_GRACE_S: Final = 1.5  # how long a round may wait for those who want to join it
BROKEN_WORDS: Final = 2  # of a peer in one round, before nothing that it says it has counted is believed
BANDWIDTH_MAX: Final = 1e12  # bytes/s; whoever reports more, or NaN, is not believed


class NoMajority(AttemptFailed):
    """Too few members of the last head answered: only the authority can go on if that stays so."""


@dataclass
class Promises:
    """Granted promises by member. `ahead` is a later head that somebody reported."""

    granted: dict[Member, Promise] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    promised_later: int = -1
    ahead: Head | None = None


class Leader:
    """Leads attempts of one round. `join_requests()` are peers outside the group that want to be planned for."""

    def __init__(self, round_: Round, join_requests: Callable[[], Mapping[str, Member]]) -> None:
        self._round = round_
        self._context = round_.context
        self._round_state = round_.round_state
        self._join_requests = join_requests
        self._given_up: set[bytes] = set()  # plans that led to nothing
        self._refused: set[str] = set()  # peers that did not take the plan
        self._lost: set[str] = set()  # peers that were gone in an exchange: as newcomers they wait for the next round
        self._reset: set[Member] = set()  # those that have counted what others have, too, or what they cannot hand in
        self._claims: Claims = {}  # what each said it had when the last batch seemed whole
        self._broken_words: Counter[str] = Counter()  # how often a peer then did not hand it in
        self._exclude_missing = False  # set when the last attempt ran out of time with nobody suspect
        self.ahead: Head | None = None

    async def lead(self, attempt: int) -> None:
        """Returns when the round is decided; `AttemptFailed` otherwise."""
        round_state = self._round_state
        promises = await self._collect_promises(attempt)
        cast = [promise.accepted for member, promise in promises.granted.items() if round_state.head.has(member)]
        unfinished = value_to_finish(cast, len(round_state.head.members))
        if unfinished is not None:
            await self._finish(attempt, unfinished, promises)
            return
        # Who has only just come is no member of the head yet: dead, it would be waited for until a deadline.
        self._context.host.watch((member.peer for member in promises.granted), cause="plan")
        try:
            await self._agree_on_work(attempt, promises)
            contributions = await self._collect_contributions(attempt, promises)
            await self._exchange(attempt, contributions, promises)
        finally:
            self._context.host.watch((), cause="plan")

    # -- promises ----------------------------------------------------------------------------------------------------

    async def _collect_promises(self, attempt: int) -> Promises:
        head, me, host = self._round_state.head, self._context.me, self._context.host
        self._round.phase("plan")
        wanted = {m.peer: m for m in head.members}
        joiners = {peer: m for peer, m in self._join_requests().items() if peer not in {*wanted, *self._lost}}
        addresses = {peer: host.book.get(peer) for peer in (*wanted, *joiners) if peer != me.peer}
        addresses[me.peer] = host.addresses
        ask = Prepare(head, attempt, addresses)
        promises = Promises()
        waiting = {peer for peer in wanted if peer != me.peer and peer not in host.suspects}
        self._note(promises, self._round.promise(ask, me.peer), me.peer)

        async def ask_one(peer: str) -> None:
            try:
                reply = await host.rpc.call(peer, PREPARE, ask, timeout_s=self._context.timeouts.answer_s)
                self._note(promises, reply.body, peer)
            except BarnraiseError as error:
                self._context.events.emit("prepare_unanswered", round=self._round.number, peer=peer, reason=str(error))
            waiting.discard(peer)
            if not waiting:
                nursery.cancel_scope.deadline = min(nursery.cancel_scope.deadline, trio.current_time() + grace_s())

        def grace_s() -> float:
            """For the joiners; none where without a majority nobody can be taken in."""
            return JOINER_GRACE_S if sum(map(head.has, promises.granted)) >= head.quorum else 0.0

        async with trio.open_nursery() as nursery:
            if not waiting:
                nursery.cancel_scope.deadline = trio.current_time() + grace_s()
            for peer in [*waiting, *joiners]:
                nursery.start_soon(ask_one, peer)
        self.ahead = promises.ahead
        members = sum(head.has(m) for m in promises.granted)
        if members < head.quorum:
            if promises.ahead is not None or promises.promised_later > attempt:
                raise AttemptFailed("others are further on")
            if members + len(promises.refused) >= head.quorum:
                raise AttemptFailed("others follow another leader")
            raise NoMajority(f"{members} of {len(head.members)} members answered, {head.quorum} are needed")
        return promises

    def _note(self, promises: Promises, promise: Promise, peer: str) -> None:
        head = self._round_state.head
        if promise.member.peer != peer or promise.head.run_id != head.run_id:
            return
        if promise.head.hash != head.hash:
            if promise.head.position > head.position:
                promises.ahead = promise.head
        elif promise.granted:
            promises.granted[promise.member] = promise
        else:
            promises.refused.add(peer)
            promises.promised_later = max(promises.promised_later, promise.promised)

    # -- compute -----------------------------------------------------------------------------------------------------

    async def _agree_on_work(self, attempt: int, promises: Promises) -> None:
        """Adopt the plan that a majority already works on, or make one; see that everybody has it."""
        round_state, context = self._round_state, self._context
        signed = self._adoptable(attempt, promises)
        if signed is None:
            speeds = {m: p.speed for m, p in promises.granted.items()}
            plan = make_plan(round_state.head, attempt, speeds, context.schedule, self._reset)
            signed = sign_body(context.identity, PLAN_KIND, plan)
        self._round.take_work(signed, finish_early=False, leader=context.me.peer)
        self._refused = await self._broadcast(START_ROUND, StartRound(signed), promises)

    def _adoptable(self, attempt: int, promises: Promises) -> Signed | None:
        """The latest plan that a majority of the head's members can still complete."""
        head = self._round_state.head
        best: tuple[int, Signed] | None = None
        for promise in promises.granted.values():
            if promise.plan is None:
                continue
            try:
                plan = open_body(promise.plan, PLAN_KIND, WorkPlan)
                check_plan(plan, head, self._context.schedule)
            except ProtocolViolation:
                continue
            if plan.hash in self._given_up or plan.attempt > attempt:
                continue
            if head.leader(max(plan.attempt, 0)).peer != promise.plan.signer:
                continue
            alive = sum(head.has(a.member) and a.member in promises.granted for a in plan.assignments)
            if alive >= head.quorum and (best is None or plan.attempt > best[0]):
                best = (plan.attempt, promise.plan)
        return best[1] if best else None

    async def _collect_contributions(self, attempt: int, promises: Promises) -> dict[Member, Submission]:
        """Wait for the work of everybody who is alive, but not for ever: the slow hand in what they have."""
        round_state = self._round_state
        for member, promise in promises.granted.items():
            if promise.plan == round_state.signed_plan and promise.contribution is not None:
                round_state.submitted[member] = promise.contribution
        plan, signed = round_state.plan, round_state.signed_plan
        assert plan is not None and signed is not None

        async def finish_early() -> None:
            self._round.take_work(signed, finish_early=True, leader=self._context.me.peer)
            await self._broadcast(START_ROUND, StartRound(signed, finish_early=True), promises)

        assigned = [a.member for a in plan.assignments if a.member in promises.granted]
        doubted = [peer for peer, times in self._broken_words.items() if times >= BROKEN_WORDS]
        collector = ContributionCollector(
            self._context, round_state, self._round.coding.count, assigned, finish_early, doubted, self._join_requests
        )
        gathering = trio.CancelScope()
        self._round.spawn(collector.gather, gathering)
        try:
            await collector.wait(attempt, self._refused)
        finally:
            gathering.cancel()
        self._claims = collector.claims
        return collector.usable()

    # -- exchange ----------------------------------------------------------------------------------------------------

    async def _exchange(self, attempt: int, contributions: dict[Member, Submission], promises: Promises) -> None:
        round_state, head, host = self._round_state, self._round_state.head, self._context.host
        plan = round_state.plan
        assert plan is not None
        blamed: set[str] = set()
        if self._exclude_missing:
            waits = {member.peer: (p.missing, p.silent) for member, p in promises.granted.items()}
            round_info = random.getrandbits(31)  # by lot: a liar that knew whose turn it is could always name another
            blamed = choose_excluded(waits, round_info) - {self._context.me.peer}
        ready = fit_roster({m: handed.signed for m, handed in contributions.items() if m in promises.granted})
        members = [m for m in ready if m.peer not in blamed]
        if sum(head.has(m) for m in members) < head.quorum:
            members = ready  # a round that may get stuck again is better than none
        if sum(head.has(m) for m in members) < head.quorum:
            if self._context.schedule.synchronous:
                self._give_up_batch(plan, contributions)
            raise AttemptFailed("too few members have handed in their work")
        self._require_batch(plan, contributions, members)
        roster = Roster(
            head=head.hash,
            plan=plan.hash,
            attempt=attempt,
            contributions=tuple(contributions[m].signed for m in members),
            owners=share_slices(self._round.coding.count, self._measured(members, promises)),
        )
        try:
            await self._round.begin_exchange(roster, self._context.me.peer)
        except RoundDiscarded as error:
            if round_state.acceptor.promised <= attempt:
                self._given_up.add(plan.hash)
            raise AttemptFailed(str(error)) from error
        self._round.spawn(self._broadcast, START_EXCHANGE, StartExchange(roster), promises)
        until = trio.current_time() + self._context.timeouts.exchange_s(self._round.payload_bytes())
        exchange = round_state.current
        while round_state.decided is None and round_state.acceptor.promised <= attempt:
            self._require_voters()
            lost = [m.peer for m in members if m.peer in host.suspects]
            if lost and exchange is not None and not exchange.built.is_set():
                self._lost.update(lost)
                raise AttemptFailed(f"lost {', '.join(lost)} in the exchange")
            if trio.current_time() > until:
                if self._exclude_missing:  # leaving out whom the others waited for did not help either
                    self._given_up.add(plan.hash)
                self._exclude_missing = True
                raise AttemptFailed("the exchange ran out of time")
            await round_state.changed.until(lambda: round_state.decided is not None, 0.25)
        if round_state.decided is None:
            raise AttemptFailed("a later attempt has begun")

    def _require_voters(self) -> None:
        """NoMajority as soon as too few are left whose votes could come: the group waits for the authority, not for
        them."""
        head, suspects = self._round_state.head, self._context.host.suspects
        alive = sum(m.peer not in suspects for m in head.members)
        if alive < head.quorum:
            raise NoMajority(f"{alive} of {len(head.members)} members are left to vote, {head.quorum} are needed")

    def _require_batch(
        self, plan: WorkPlan, contributions: Mapping[Member, Submission], members: Sequence[Member]
    ) -> None:
        """A synchronous pipeline's round must be about its whole batch. Where it is not, because somebody who has
        counted a part is gone, or two have counted the same, the plan is given up: under the next one the members go on
        with what each has, but for those that are in the way of others."""
        batch = self._context.schedule.batch(self._round_state.head)
        if batch is None:
            return
        bodies = [contributions[member].body for member in members]
        kept = select_disjoint(bodies)
        if covers_batch([body for body, merged in zip(bodies, kept, strict=True) if merged], batch):
            return
        self._give_up_batch(plan, contributions)
        self._reset |= {body.member for body, merged in zip(bodies, kept, strict=True) if not merged}
        raise AttemptFailed("not all of the batch was counted, once each: what is missing is issued again")

    def _give_up_batch(self, plan: WorkPlan, contributions: Mapping[Member, Submission]) -> None:
        """Whoever has handed in what cannot be used, or less than it said it had, begins anew, or the next plan would
        be as short. After `BROKEN_WORDS` times it is not asked what it has, and that is issued again."""
        self._given_up.add(plan.hash)
        self._reset = set()
        for member in {*self._round_state.head.members, *(a.member for a in plan.assignments)}:
            usable, assignment = contributions.get(member), plan.of(member)
            submitted, told = member in self._round_state.submitted, assignment is not None and assignment.reset
            kept_word = contains(usable.body.counted if usable else (), self._claims.get(member.peer, ()))
            # Who was told to begin anew may have said just before what it had.
            if (submitted and usable is None) or not (kept_word or told):
                self._broken_words[member.peer] += 1
                self._reset |= {member} if submitted else set()
        inside = {m.peer for m in (*self._round_state.head.members, *(a.member for a in plan.assignments))}
        # Who knocks has its turn in the next plan, and has to keep its word there.
        self._broken_words.update(peer for peer, claim in self._claims.items() if claim and peer not in inside)

    def _measured(self, members: list[Member], promises: Promises) -> list[float]:
        """Bytes/s to each member: the lower median of what the others measured, never what it says of itself."""
        speeds = []
        for member in members:
            seen = [
                p.bandwidths[member.peer]
                for m, p in promises.granted.items()
                if m != member and 0 < p.bandwidths.get(member.peer, 0.0) < BANDWIDTH_MAX
            ]
            speeds.append(median_low(seen) if seen else 0.0)
        return speeds

    async def _finish(self, attempt: int, unfinished: Accepted, promises: Promises) -> None:
        """Some member voted in an earlier attempt, which may have been decided: complete that one."""
        round_state = self._round_state
        ways = [
            Finish(attempt, unfinished, promise.accepted_plan, promise.accepted_roster, member.peer)
            for member, promise in sorted(promises.granted.items())
            if promise.accepted == unfinished and promise.accepted_plan and promise.accepted_roster
        ]
        if not ways:
            raise AttemptFailed("nobody can say how to finish the earlier attempt")
        finish = ways[attempt % len(ways)]  # should that one not have the results that it says it has, the next one may
        await self._round.begin_finish(finish, self._context.me.peer)
        await self._broadcast(FINISH, finish, promises)
        until = trio.current_time() + self._context.timeouts.exchange_s(self._round.payload_bytes())
        while round_state.decided is None:
            if finish.holder in self._context.host.suspects and round_state.candidate != unfinished.head:
                raise AttemptFailed(f"lost {finish.holder}, who held the result of the earlier attempt")
            if round_state.acceptor.promised > attempt or trio.current_time() > until:
                raise AttemptFailed("the earlier attempt could not be finished")
            await round_state.changed.until(lambda: round_state.decided is not None, 0.25)

    async def _broadcast(self, method: Any, body: msgspec.Struct, promises: Promises) -> set[str]:
        """Tell everybody who promised; returns who did not take it."""
        refused: set[str] = set()

        async def tell(peer: str) -> None:
            try:
                await self._context.host.rpc.call(peer, method, body, timeout_s=self._context.timeouts.answer_s)
            except BarnraiseError as error:
                refused.add(peer)
                self._context.events.emit("order_refused", round=self._round.number, peer=peer, reason=str(error))

        async with trio.open_nursery() as nursery:
            for member in promises.granted:
                if member != self._context.me:
                    nursery.start_soon(tell, member.peer)
        return refused
