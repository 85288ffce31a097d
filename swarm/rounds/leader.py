"""The leader of a round's attempts: promises -> plan -> contributions -> roster -> decision.

Any member may become the leader; the head fixes the leader of each attempt (`Head.leader`). A leader decides nothing
that the others cannot check: it collects, orders and repeats. It holds no lock, so its death costs a few seconds.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from statistics import median_low
from typing import Any, Final

import msgspec
import trio

from peer.errors import BarnraiseError, NoQuorum, ProtocolViolation, RoundDiscarded, RoundError
from peer.identity import Signed, open_body, sign_body
from swarm.protocol.exclusion import choose_excluded
from swarm.protocol.head import Head, Member
from swarm.protocol.ledger import Range, contains
from swarm.protocol.messages import (
    FINISH,
    START_EXCHANGE,
    START_ROUND,
    Finish,
    Promise,
    StartExchange,
    StartRound,
)
from swarm.protocol.overlaps import covers_batch, select_disjoint
from swarm.protocol.paxos import Accepted, value_to_finish
from swarm.protocol.plan import (
    PLAN_KIND,
    Contribution,
    Roster,
    WorkPlan,
    check_plan,
    fit_roster,
    make_plan,
    share_slices,
)
from swarm.rounds.collect import ContributionCollector
from swarm.rounds.promises import collect_promises, granted_by, later_head, require_quorum
from swarm.rounds.round import Round

FALSE_CLAIMS_MAX: Final = 2  # of one peer in a round; from then on its claims are ignored
BANDWIDTH_MAX: Final = 1e12  # bytes/s; a higher measurement, or NaN, is ignored


class Leader:
    """Leads attempts of one round. `join_requests()` returns the peers outside the group that ask to join."""

    def __init__(self, round_: Round, join_requests: Callable[[], Mapping[str, Member]]) -> None:
        self._round = round_
        self._context = round_.context
        self._round_state = round_.round_state
        self._join_requests = join_requests
        self._given_up: set[bytes] = set()  # hashes of plans that cannot be completed
        self._refused: set[str] = set()  # peers that did not take the plan
        self._lost: set[str] = set()  # peers lost in an exchange: they may join in the next round
        self._reset: set[Member] = set()  # members that must forget what they have counted
        self._claims: Mapping[str, Sequence[Range]] = {}  # the samples each peer claimed when the batch seemed complete
        self._false_claims: Counter[str] = Counter()  # how often a peer did not submit what it had claimed
        self._exclude_missing = False  # set when an exchange times out although no peer is suspected
        self.ahead: Head | None = None
        """A later head that a peer reported in the last attempt."""

    async def lead(self, attempt: int) -> None:
        """Lead one attempt; return when the round is decided.

        Raises `RoundError` if the attempt fails, and `NoQuorum` if too few members are alive."""
        round_state = self._round_state
        self._round.phase("plan")
        joiners = [peer for peer in self._join_requests() if peer not in self._lost]
        answers = await collect_promises(self._round, attempt, joiners)
        self.ahead = later_head(answers, round_state.head)
        require_quorum(answers, round_state.head, attempt)
        promises = granted_by(answers, round_state.head)
        cast = [promise.accepted for member, promise in promises.items() if round_state.head.has(member)]
        unfinished = value_to_finish(cast, len(round_state.head.members))
        if unfinished is not None:
            await self._finish(attempt, unfinished, promises)
            return
        # Joiners are no members of the head, so the engine does not watch them. A dead one would cost a deadline.
        self._context.host.watch((member.peer for member in promises), cause="plan")
        try:
            await self._agree_on_work(attempt, promises)
            contributions = await self._collect_contributions(attempt, promises)
            await self._exchange(attempt, contributions, promises)
        finally:
            self._context.host.watch((), cause="plan")

    # -- compute -----------------------------------------------------------------------------------------------------

    async def _agree_on_work(self, attempt: int, promises: Mapping[Member, Promise]) -> None:
        """Adopt the plan that a majority already works on, or make one; send it to all that promised."""
        round_state, context = self._round_state, self._context
        signed = self._adoptable(attempt, promises)
        if signed is None:
            speeds = {m: p.speed for m, p in promises.items()}
            plan = make_plan(round_state.head, attempt, speeds, context.schedule, self._reset)
            signed = sign_body(context.identity, PLAN_KIND, plan)
        self._round.take_work(signed, finish_early=False, leader=context.me.peer)
        self._refused = await self._broadcast(START_ROUND, StartRound(signed), promises)

    def _adoptable(self, attempt: int, promises: Mapping[Member, Promise]) -> Signed | None:
        """Return the latest plan that a majority of the head's members can still complete, or None."""
        head = self._round_state.head
        best: tuple[int, Signed] | None = None
        for promise in promises.values():
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
            alive = sum(head.has(a.member) and a.member in promises for a in plan.assignments)
            if alive >= head.quorum and (best is None or plan.attempt > best[0]):
                best = (plan.attempt, promise.plan)
        return best[1] if best else None

    async def _collect_contributions(
        self, attempt: int, promises: Mapping[Member, Promise]
    ) -> dict[Member, Contribution]:
        """Wait for the contributions of all live members; after a while, ask slow members for what they have."""
        round_state = self._round_state
        for member, promise in promises.items():
            if promise.plan == round_state.signed_plan and promise.contribution is not None:
                round_state.submitted[member] = promise.contribution
        plan, signed = round_state.plan, round_state.signed_plan
        assert plan is not None and signed is not None

        async def finish_early() -> None:
            self._round.take_work(signed, finish_early=True, leader=self._context.me.peer)
            await self._broadcast(START_ROUND, StartRound(signed, finish_early=True), promises)

        assigned = [a.member for a in plan.assignments if a.member in promises]
        doubted = [peer for peer, times in self._false_claims.items() if times >= FALSE_CLAIMS_MAX]
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

    async def _exchange(
        self, attempt: int, contributions: dict[Member, Contribution], promises: Mapping[Member, Promise]
    ) -> None:
        round_state, head, host = self._round_state, self._round_state.head, self._context.host
        plan = round_state.plan
        assert plan is not None
        excluded: set[str] = set()
        if self._exclude_missing:
            waits = {member.peer: (p.missing, p.silent) for member, p in promises.items()}
            tie_breaker = random.getrandbits(
                31
            )  # random: a liar that could predict it would always accuse another peer
            excluded = choose_excluded(waits, tie_breaker) - {self._context.me.peer}
        submitted = dict(round_state.submitted)  # unchanged since they were checked: no checkpoint in between
        ready = fit_roster({m: submitted[m] for m in contributions if m in promises})
        members = [m for m in ready if m.peer not in excluded]
        if sum(head.has(m) for m in members) < head.quorum:
            members = ready  # an exchange that may time out again is better than none
        if sum(head.has(m) for m in members) < head.quorum:
            if self._context.schedule.synchronous:
                self._give_up_batch(plan, contributions)
            raise RoundError("too few members have submitted a contribution")
        self._require_batch(plan, contributions, members)
        roster = Roster(
            head=head.hash,
            plan=plan.hash,
            attempt=attempt,
            contributions=tuple(submitted[m] for m in members),
            owners=share_slices(self._round.coding.count, self._measured(members, promises)),
        )
        try:
            await self._round.begin_exchange(roster, self._context.me.peer)
        except RoundDiscarded as error:
            if round_state.acceptor.promised <= attempt:
                self._given_up.add(plan.hash)
            raise RoundError(str(error)) from error
        self._round.spawn(self._broadcast, START_EXCHANGE, StartExchange(roster), promises)
        until = trio.current_time() + self._context.timeouts.exchange_s(self._round.payload_bytes())
        exchange = round_state.current
        while round_state.decided is None and round_state.acceptor.promised <= attempt:
            self._require_voters()
            lost = [m.peer for m in members if m.peer in host.suspects]
            if lost and exchange is not None and not exchange.built.is_set():
                self._lost.update(lost)
                raise RoundError(f"lost {', '.join(lost)} in the exchange")
            if trio.current_time() > until:
                if self._exclude_missing:  # excluding the peers that others waited for did not help
                    self._given_up.add(plan.hash)
                self._exclude_missing = True
                raise RoundError("the exchange timed out")
            await round_state.changed.until(lambda: round_state.decided is not None, 0.25)
        if round_state.decided is None:
            raise RoundError("a later attempt has begun")

    def _require_voters(self) -> None:
        """Raise `NoQuorum` as soon as too few live members are left to vote: only the authority can help then."""
        head, suspects = self._round_state.head, self._context.host.suspects
        alive = sum(m.peer not in suspects for m in head.members)
        if alive < head.quorum:
            raise NoQuorum(f"{alive} of {len(head.members)} members are left to vote, {head.quorum} are needed")

    def _require_batch(
        self, plan: WorkPlan, contributions: Mapping[Member, Contribution], members: Sequence[Member]
    ) -> None:
        """Raise `RoundError` unless these members have counted the whole batch of a synchronous pipeline.

        A part is missing if a member that has counted it is gone, or if two members have counted the same. Then the
        plan is given up. Under the next plan the members keep what they have, except those that overlap others."""
        batch = self._context.schedule.batch(self._round_state.head)
        if batch is None:
            return
        bodies = [contributions[member] for member in members]
        kept = select_disjoint(bodies)
        if covers_batch([body for body, merged in zip(bodies, kept, strict=True) if merged], batch):
            return
        self._give_up_batch(plan, contributions)
        self._reset |= {body.member for body, merged in zip(bodies, kept, strict=True) if not merged}
        raise RoundError("not all of the batch was counted exactly once: the rest is dispatched again")

    def _give_up_batch(self, plan: WorkPlan, contributions: Mapping[Member, Contribution]) -> None:
        """Give up the plan of an incomplete batch, and note which members must forget what they have counted.

        These are the members that submitted something unusable, or less than they had claimed: the next batch would be
        incomplete, too. After `FALSE_CLAIMS_MAX` times a peer's claims are ignored and its samples dispatched again."""
        self._given_up.add(plan.hash)
        self._reset = set()
        for member in {*self._round_state.head.members, *(a.member for a in plan.assignments)}:
            usable, assignment = contributions.get(member), plan.of(member)
            submitted, told = member in self._round_state.submitted, assignment is not None and assignment.reset
            claim_holds = contains(usable.counted if usable else (), self._claims.get(member.peer, ()))
            # A member that was told to forget its samples may have claimed them just before.
            if (submitted and usable is None) or not (claim_holds or told):
                self._false_claims[member.peer] += 1
                self._reset |= {member} if submitted else set()
        inside = {m.peer for m in (*self._round_state.head.members, *(a.member for a in plan.assignments))}
        # Peers that ask to join are in the next plan, where they must submit what they claim.
        self._false_claims.update(peer for peer, claim in self._claims.items() if claim and peer not in inside)

    def _measured(self, members: list[Member], promises: Mapping[Member, Promise]) -> list[float]:
        """Return the bytes/s to each member: the lower median of what the others measured."""
        speeds = []
        for member in members:
            seen = [
                p.bandwidths[member.peer]
                for m, p in promises.items()
                if m != member and 0 < p.bandwidths.get(member.peer, 0.0) < BANDWIDTH_MAX
            ]
            speeds.append(median_low(seen) if seen else 0.0)
        return speeds

    async def _finish(self, attempt: int, unfinished: Accepted, promises: Mapping[Member, Promise]) -> None:
        """Finish an earlier attempt that may have been decided, since some member voted in it."""
        round_state = self._round_state
        ways = [
            Finish(attempt, unfinished, promise.accepted_plan, promise.accepted_roster, member.peer)
            for member, promise in sorted(promises.items())
            if promise.accepted == unfinished and promise.accepted_plan and promise.accepted_roster
        ]
        if not ways:
            raise RoundError("no member has the roster and plan of the earlier attempt")
        finish = ways[attempt % len(ways)]  # if that holder lacks the results, the next attempt asks another
        await self._round.begin_finish(finish, self._context.me.peer)
        await self._broadcast(FINISH, finish, promises)
        until = trio.current_time() + self._context.timeouts.exchange_s(self._round.payload_bytes())
        while round_state.decided is None:
            if finish.holder in self._context.host.suspects and round_state.candidate != unfinished.head:
                raise RoundError(f"lost {finish.holder}, which held the result of the earlier attempt")
            if round_state.acceptor.promised > attempt or trio.current_time() > until:
                raise RoundError("the earlier attempt could not be finished in time")
            await round_state.changed.until(lambda: round_state.decided is not None, 0.25)

    async def _broadcast(self, method: Any, body: msgspec.Struct, promises: Mapping[Member, Promise]) -> set[str]:
        """Send an order to all that promised; return the peers that refused it or did not answer."""
        refused: set[str] = set()

        async def tell(peer: str) -> None:
            try:
                await self._context.host.rpc.call(peer, method, body, timeout_s=self._context.timeouts.answer_s)
            except BarnraiseError as error:
                refused.add(peer)
                self._context.events.emit("order_refused", round=self._round.number, peer=peer, reason=str(error))

        async with trio.open_nursery() as nursery:
            for member in promises:
                if member != self._context.me:
                    nursery.start_soon(tell, member.peer)
        return refused
