"""A peer's life in a run, head after head: take part in rounds, or catch up and knock until the group plans for it.

One `Round` is alive at a time. Calls from other peers are routed to it by the head they name; a call that names a
head we do not have makes us look where the run stands, but only what `swarm.follow` accepts makes us leave the round.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import trio

from optim.recipes.interface import Coding
from peer.errors import BarnraiseError, NetworkError, ProtocolViolation, RoundDiscarded, RoundError
from peer.identity import Signed
from peer.method import Call
from peer.wire import Buffer
from swarm import messages as say
from swarm.chain import TRIES_PER_LEADER, Head, Member
from swarm.contribute import Contributor
from swarm.follow import Sighting, Viewpoint, ask_standings, open_regroup, weigh
from swarm.height import Changed, Height
from swarm.knockers import Knockers
from swarm.leader import Leader, NoMajority
from swarm.post import Post
from swarm.round import Nurseries, Round

KNOCK_EVERY_S: Final = 1.0
LOOK_AROUND_S: Final = 5.0  # a member whose round does not move looks whether the run is elsewhere
LOOK_PAUSE_S: Final = 0.1  # after a look for nothing, then doubled: a burst of calls must not become a burst of polls
KNOCK_BEHIND_MAX: Final = 2  # rounds: who is that near catches up by replay while its promise is waited for
ASK_AUTHORITY_EVERY_S: Final = 1.5
ADDRESSES_MAX: Final = 1024  # learnt from one message


class Keeper(Protocol):
    """Who keeps and fetches states on the engine's behalf (`swarm.participant`)."""

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        """The state of `head` is now current; `results` are the encoded merged slices that led to it."""

    async def fetch(self, sighting: Sighting, mine: Head) -> None:
        """Bring the outer state to that of `sighting.head`. `NetworkError` if no donor could deliver it."""

    def known_peers(self) -> Iterable[str]:
        """Peers of this run seen lately, besides the members of the current head."""


@dataclass(frozen=True)
class RunFacts:
    """What an engine must know of the run: its genesis, who signs regroups, after how many rounds it ends (0: never),
    how many peers may take part."""

    genesis: Head
    authority: str
    rounds: int
    max_peers: int


class Engine:
    """`run()` takes part until the run's number of rounds is committed."""

    def __init__(self, post: Post, run: RunFacts, head: Head, regroup: Signed | None, keeper: Keeper) -> None:
        self.head = head
        self.regroup = regroup
        self.phase = "joining"
        self._post = post
        self._keeper = keeper
        self._run = run
        self._round: Round | None = None
        self._knockers = Knockers()
        self._contributor = Contributor(post)
        self._moved = Changed()  # to another head
        self._look = trio.Event()  # set when somebody seems to be further on
        self._offer: Sighting | None = None  # a regroup that the authority pushed to us
        self._serve()

    async def run(self) -> None:
        height: Height | None = None
        async with trio.open_nursery() as lingering:
            while not self._run.rounds or self.head.round < self._run.rounds:
                height = Height(self.head, self._post.me, height)
                better: list[Sighting] = []
                coding = await self._coding()
                async with trio.open_nursery() as tasks:
                    nurseries = Nurseries(tasks, lingering)
                    round_ = Round(self._post, height, coding, self._contributor, nurseries, self._look_again)
                    self._round = round_
                    self._moved.notify()
                    try:
                        better += await self._live(round_)
                    finally:
                        round_.close()
                    tasks.cancel_scope.cancel()
                if height.decided is not None:
                    await self._commit(round_, height.decided)
                else:
                    await round_.abandon()
                    if height.plan is not None and better[0].head.term > self.head.term:
                        round_.discard("the group was regrouped")
                    await self._catch_up(height, better[0])
            self.phase = "finished"
            self._round = None
            await self._serve_stragglers()
            lingering.cancel_scope.cancel()

    async def _coding(self) -> Coding:
        """How the messages of the next round are coded; where that depends on the state it takes a while."""
        state = self._post.state
        return await trio.to_thread.run_sync(state.recipe.coding, self._post.pace.turn(self.head), state.tensors)

    def _look_again(self) -> None:
        self._look.set()

    def standing(self) -> say.Standing:
        return say.Standing(self.head, self._post.me, self.phase, self.regroup)

    # -- one head ----------------------------------------------------------------------------------------------------

    async def _live(self, round_: Round) -> list[Sighting]:
        """Returns when the round is decided (empty), or with a better head that was found elsewhere."""
        better: list[Sighting] = []
        part = self._lead_or_follow if round_.height.head.has(self._post.me) else self._knock

        async def take_part() -> None:
            await part(round_)
            nursery.cancel_scope.cancel()

        async def look_around() -> None:
            better.append(await self._look_around(round_))
            nursery.cancel_scope.cancel()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(take_part)
            nursery.start_soon(look_around)
        return [] if round_.height.decided is not None else better

    async def _lead_or_follow(self, round_: Round) -> None:
        """A member's part: see to it that some attempt of the round is led, by itself if it comes to that."""
        height, head, host = round_.height, round_.height.head, self._post.host
        host.watch(m.peer for m in head.members if m != self._post.me)
        leader = Leader(round_, self.knockers)
        floor = 0
        while height.decided is None:
            floor = max(floor, height.acceptor.promised)
            attempt = height.awaited = head.next_attempt(floor, host.suspects)
            if head.leader(attempt) == self._post.me:
                self.phase = "leading"
                floor = attempt + 1
                try:
                    await leader.lead(attempt)
                except NoMajority as error:
                    await self._wait_for_majority(round_, str(error))
                except (RoundError, ProtocolViolation) as error:
                    self._post.events.emit("attempt_failed", round=round_.number, attempt=attempt, reason=str(error))
                if leader.ahead is not None:
                    self._look.set()
            else:
                self.phase = "training"
                await self._follow(height, attempt)
                if height.acceptor.promised <= attempt:
                    floor = (attempt // TRIES_PER_LEADER + 1) * TRIES_PER_LEADER

    async def _follow(self, height: Height, attempt: int) -> None:
        """Wait while the leader of `attempt` makes progress."""
        leader = height.head.leader(attempt).peer
        height.expect_progress_within(2 * self._post.tempo.answer_s)
        while height.decided is None and height.acceptor.promised <= attempt:
            if leader in self._post.host.suspects or trio.current_time() > height.stage_deadline:
                return
            await height.changed.until(lambda: height.decided is not None, 0.25)

    async def _knock(self, round_: Round) -> None:
        """A joiner's part: tell the members that we hold their head's state, until a round that has us is decided."""
        height, post = round_.height, self._post
        self.phase = "knocking"
        knock = say.Knock(height.head.hash, height.head.round, post.me, post.host.addresses)
        while height.decided is None:
            doors = [*(m.peer for m in height.head.members), self._run.authority]
            async with trio.open_nursery() as nursery:
                for door in doors:
                    nursery.start_soon(self._knock_at, door, knock)
            await height.changed.until(lambda: height.decided is not None, KNOCK_EVERY_S)

    async def _knock_at(self, door: str, knock: say.Knock) -> None:
        try:
            reply = await self._post.host.rpc.call(door, say.KNOCK, knock, timeout_s=self._post.tempo.answer_s)
        except BarnraiseError:
            return
        if reply.body.head.hash != knock.head:
            self._look.set()

    async def _look_around(self, round_: Round) -> Sighting:
        """Look where the run stands when somebody seems to be further on, and now and then anyway; returns what is."""
        head = round_.height.head
        pause_s = LOOK_PAUSE_S
        while True:
            with trio.move_on_after(LOOK_AROUND_S):
                await self._look.wait()
            self._look = trio.Event()
            best, self._offer = self._offer or await self.best_sighting(), None
            if best is not None and best.head.height > head.height and best.head.hash != head.hash:
                return best
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_AROUND_S / 2)

    async def best_sighting(self) -> Sighting | None:
        """The head that counts most among all the peers we know of."""
        me = self._post.me.peer
        peers = [m.peer for m in self.head.members] + [self._run.authority] + list(self._keeper.known_peers())
        suspects = self._post.host.suspects
        mine, view = (me, self.standing()), Viewpoint(self._post.me, self.head)

        def weighed(standings: list[tuple[str, say.Standing]], unheard: int = 0) -> list[Sighting]:
            return weigh([*standings, mine], self._run.authority, self._run.genesis, view, unheard)

        def enough(standings: list[tuple[str, say.Standing]], unheard: int) -> bool:
            """A majority further on is worth following at once; whoever is frozen would hold up the answer."""
            return any(s.head.height > self.head.height for s in weighed(standings, unheard)[:1])

        others = [peer for peer in peers if peer != me and peer not in suspects]
        sightings = weighed(await ask_standings(self._post.host.rpc, others, enough=enough))
        return sightings[0] if sightings else None

    async def _wait_for_majority(self, round_: Round, reason: str) -> None:
        """Too few members are left to go on: only the authority may regroup us. Wait, and say so."""
        self.phase = "waiting for a majority"
        self._post.events.emit("majority_lost", round=round_.number, reason=reason)
        try:
            reply = await self._post.host.rpc.call(
                self._run.authority, say.NEED_REGROUP, say.AskHead(), timeout_s=self._post.tempo.answer_s
            )
            if reply.body.head.height > round_.height.head.height:
                self._look.set()
        except BarnraiseError as error:
            self._post.events.emit("authority_unreachable", round=round_.number, reason=str(error))
        await trio.sleep(ASK_AUTHORITY_EVERY_S)

    # -- changing heads ----------------------------------------------------------------------------------------------

    async def _commit(self, round_: Round, head: Head) -> None:
        exchange = round_.height.sealed_by
        assert exchange is not None
        self._post.state.commit(head.state_hash)
        self.head = head
        round_.end(head)
        self._knockers.settle(exchange.merge.plan, head)
        results = [exchange.results[i] for i in sorted(exchange.results)]
        await self._keeper.committed(head, results)

    async def _catch_up(self, height: Height, sighting: Sighting) -> None:
        """Move to a head that others committed: by our own sealed result, by a change of term, or by fetching. If that
        fails we stay where we are, unless the state has moved on part of the way."""
        self.phase = "catching up"
        state = self._post.state
        while True:
            head = sighting.head
            try:
                if height.sealed is not None and height.sealed.hash == head.hash:
                    state.commit(head.state_hash)
                elif head.state_hash != state.tree.root:
                    await self._keeper.fetch(sighting, self.head)
                break
            except (NetworkError, ProtocolViolation) as error:
                self._post.events.emit("catch_up_failed", round=head.round, reason=str(error))
                await trio.sleep(KNOCK_EVERY_S)
            if state.tree.root == self.head.state_hash:
                return
            sighting = await self.best_sighting() or sighting
        self.head, self.regroup = head, sighting.regroup
        await self._keeper.committed(head, [])

    async def _serve_stragglers(self) -> None:
        """The run is complete: stay until every member of the last head is there too, but not for ever."""
        with trio.move_on_after(4 * self._post.tempo.answer_s):
            while True:
                others = [m.peer for m in self.head.members if m != self._post.me]
                standings = await ask_standings(self._post.host.rpc, others)
                if sum(s.head.hash == self.head.hash for _, s in standings) == len(others):
                    return
                await trio.sleep(KNOCK_EVERY_S)

    # -- calls from others -------------------------------------------------------------------------------------------

    def knockers(self) -> dict[str, Member]:
        """Who wants to be planned for."""
        return self._knockers.ready(self._run.max_peers - len(self.head.members))

    def _learn(self, addresses: Mapping[str, tuple[str, ...]]) -> None:
        for peer, known in list(addresses.items())[:ADDRESSES_MAX]:
            self._post.host.book.add(peer, known)

    def _serve(self) -> None:
        rpc = self._post.host.rpc
        rpc.serve(say.PREPARE, self._on_prepare)
        rpc.serve(say.WORK, self._on_work)
        rpc.serve(say.HAND_IN, self._on_hand_in)
        rpc.serve(say.EXCHANGE, self._on_exchange)
        rpc.serve(say.FINISH, self._on_finish)
        rpc.serve(say.VOTE, self._on_vote)
        rpc.serve(say.CONTRIBUTION, self._on_contribution)
        rpc.serve(say.RESULT, self._on_result)
        rpc.serve(say.FETCH_RESULT, self._on_fetch)
        rpc.serve(say.STANDING, self._on_standing)
        rpc.serve(say.KNOCK, self._on_knock)
        rpc.serve(say.REGROUP, self._on_regroup)

    def _current(self) -> Round:
        if self._round is None:
            raise RoundDiscarded("this peer takes part in no round at the moment")
        return self._round

    async def _on_prepare(self, call: Call[say.Prepare]) -> say.Promise:
        ask = call.body
        if ask.head.run_id != self.head.run_id:
            raise ProtocolViolation("a peer of another run asked for a promise")
        if self._round is None or self._round.height.head.height < ask.head.height:
            with trio.move_on_after(0.3):  # usually we are about to commit that very head ourselves
                await self._reach(ask.head)
            if self.head.height < ask.head.height:
                self._look.set()
                with trio.move_on_after(self._post.tempo.answer_s / 2):  # catching up by replay takes less
                    await self._reach(ask.head)
        round_ = self._current()
        if round_.height.head.hash != ask.head.hash:
            return say.Promise(granted=False, promised=-1, head=self.head, member=self._post.me)
        promise = await round_.promise_when_due(ask, call.peer)
        if promise.granted:
            self._learn(ask.addresses)
        return promise

    async def _reach(self, head: Head) -> None:
        while self._round is None or self._round.height.head.height < head.height:
            await self._moved.wait(1.0)

    def _named(self, head: bytes) -> Round:
        """The round, if it is the one that the call is about."""
        round_ = self._current()
        if round_.height.head.hash != head:
            self._look.set()
            raise RoundDiscarded("that round is over, or not begun here")
        return round_

    async def _on_work(self, call: Call[say.Work]) -> say.Done:
        self._current().take_work(call.body.plan, call.body.wrap_up, call.peer)
        return say.Done()

    async def _on_hand_in(self, call: Call[say.HandIn]) -> say.Done:
        self._current().take_hand_in(call.body.contribution)
        return say.Done()

    async def _on_exchange(self, call: Call[say.Exchange]) -> say.Done:
        await self._named(call.body.roster.head).begin_exchange(call.body.roster, call.peer)
        return say.Done()

    async def _on_finish(self, call: Call[say.Finish]) -> say.Done:
        await self._named(call.body.roster.head).begin_finish(call.body, call.peer)
        return say.Done()

    async def _on_vote(self, call: Call[say.Vote]) -> say.VoteSeen:
        if self._round is not None and self._round.height.head.hash == call.body.head:
            self._round.voting.take(call.body, call.peer)
        elif call.body.head != self.head.previous:
            self._look.set()
        return say.VoteSeen(self.head.hash)

    async def _on_contribution(self, call: Call[say.SliceOf]) -> say.Done:
        return await self._current().take_contribution(call)

    async def _on_result(self, call: Call[say.SliceOf]) -> say.Done:
        return await self._current().take_result(call)

    async def _on_fetch(self, call: Call[say.SliceOf]) -> tuple[say.Done, Buffer]:
        exchange = self._current().height.exchanges.get(call.body.key)
        if exchange is None or call.body.index not in exchange.results:
            raise RoundDiscarded("that result is not here")
        return say.Done(), exchange.results[call.body.index]

    async def _on_standing(self, call: Call[say.AskHead]) -> say.Standing:
        return self.standing()

    async def _on_knock(self, call: Call[say.Knock]) -> say.Standing:
        knock = call.body
        if knock.member.peer != call.peer:
            raise ProtocolViolation("a knock names another peer than its sender")
        self._post.host.book.add(call.peer, knock.addresses)
        near = knock.head == self.head.hash or 0 < self.head.round - knock.round <= KNOCK_BEHIND_MAX
        if near:
            self._knockers.knock(knock.member)
        return self.standing()

    async def _on_regroup(self, call: Call[say.Regroup]) -> say.Standing:
        """The authority (or whoever passes its signature on) begins a new term."""
        head = open_regroup(call.body.signed, self._run.authority, self.head.run_id)
        if head.height > self.head.height:
            self._learn(call.body.addresses)
            self._offer = Sighting(head, (call.peer,), call.body.signed)
            self._look.set()
        return self.standing()
