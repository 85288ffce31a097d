"""A peer's life in a run, head after head: take part in rounds, or catch up and knock until the group plans for it.

One `Round` is alive at a time. Calls from other peers are routed to it by the head they name; a call that names a
head we do not have makes us look where the run stands, but only what `swarm.protocol.quorum` accepts makes us leave
the round.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, Protocol

import trio

from optim.strategies.interface import Coding
from peer.errors import BarnraiseError, NetworkError, ProtocolViolation, RemoteError, RoundError
from peer.identity import Signed
from peer.net.rpc_server import BUSY
from swarm.protocol import messages as say
from swarm.protocol.head import TRIES_PER_LEADER, Head, Member
from swarm.protocol.ledger import Range
from swarm.protocol.quorum import ASKED_MAX, HeadCandidate, Viewpoint, ask_standings, weigh
from swarm.rounds.context import RoundContext
from swarm.rounds.contribution import Contributor
from swarm.rounds.handlers import EngineState, RoundHandlers, RunLimits
from swarm.rounds.leader import Leader, NoMajority
from swarm.rounds.round import Nurseries, Round
from swarm.rounds.round_state import RoundState

KNOCK_EVERY_S: Final = 1.0
SEE_OFF_EVERY_S: Final = 0.2  # whoever has seen all others at the run's end is gone within a second
LEADER_LEFT_S: Final = 1.0  # how often it is looked whether a pipeline's leader has moved to another stage
LOOK_AROUND_S: Final = 5.0  # a member whose round does not move looks whether the run is elsewhere
LOOK_PAUSE_S: Final = 0.1  # after a look for nothing, then doubled: a burst of calls must not become a burst of polls
ASK_AUTHORITY_EVERY_S: Final = 1.5


class Keeper(Protocol):
    """Who keeps and fetches states on the engine's behalf (`swarm.training.peer`)."""

    async def committed(self, head: Head, results: list[memoryview]) -> None:
        """The state of `head` is now current; `results` are the encoded merged slices that led to it."""

    async def fetch(self, sighting: HeadCandidate, mine: Head) -> None:
        """Bring the outer state to that of `sighting.head`. `NetworkError` if no donor could deliver it."""

    def known_peers(self) -> Iterable[str]:
        """Peers of this run seen lately, besides the members of the current head."""


class Engine:
    """`run()` takes part until the run's number of rounds is committed."""

    def __init__(self, post: RoundContext, run: RunLimits, head: Head, regroup: Signed | None, keeper: Keeper) -> None:
        self._here = here = EngineState(head, regroup)
        self._post = post
        self._keeper = keeper
        self._run = run
        self._contributor = Contributor(post)
        self.counted: tuple[tuple[Range, ...], ...] = ()
        """In a pipeline: the samples of each contribution that the last commit has merged."""
        RoundHandlers(post, run, here).open()

    async def run(self) -> None:
        height: RoundState | None = None
        async with trio.open_nursery() as lingering:
            while not self._run.rounds or self.head.round < self._run.rounds:
                height = RoundState(self.head, self._post.me, height)
                better: list[HeadCandidate] = []
                coding = await self._coding()
                async with trio.open_nursery() as tasks:
                    nurseries = Nurseries(tasks, lingering)
                    round_ = Round(self._post, height, coding, self._contributor, nurseries, self._look_again)
                    self._here.round = round_
                    self._here.moved.notify()
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
            self._here.phase = "finished"
            self._here.round = None
            await self._serve_stragglers()
            lingering.cancel_scope.cancel()

    async def _coding(self) -> Coding:
        """How the messages of the next round are coded; where that depends on the state it takes a while."""
        state = self._post.state
        return await trio.to_thread.run_sync(state.recipe.coding, self._post.pace.turn(self.head), state.tensors)

    def _look_again(self) -> None:
        self._here.look.set()

    @property
    def head(self) -> Head:
        return self._here.head

    @property
    def regroup(self) -> Signed | None:
        """The authority's signature of the head's term."""
        return self._here.regroup

    @property
    def phase(self) -> str:
        return self._here.phase

    @property
    def takes_part(self) -> bool:
        """Whether the group counts on this peer: as a member, or as somebody whom the present plan takes in."""
        round_, me = self._here.round, self._post.me
        plan = round_.height.plan if round_ is not None else None
        return self.head.has(me) or (plan is not None and plan.of(me) is not None)

    def _ready(self) -> dict[str, Member]:
        """Who wants to be planned for."""
        return self._here.knockers.ready(self._run.max_peers - len(self.head.members))

    # -- one head ----------------------------------------------------------------------------------------------------

    async def _live(self, round_: Round) -> list[HeadCandidate]:
        """Returns when the round is decided (empty), or with a better head that was found elsewhere."""
        better: list[HeadCandidate] = []
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
        leader = Leader(round_, self._ready)
        floor = 0
        while height.decided is None:
            floor = max(floor, height.acceptor.promised)
            attempt = height.awaited = head.next_attempt(floor, host.suspects)
            round_.patience.turn_to(head.leader(attempt).peer)
            if head.leader(attempt) == self._post.me:
                self._here.phase = "leading"
                floor = attempt + 1
                try:
                    await leader.lead(attempt)
                except NoMajority as error:
                    await self._wait_for_majority(round_, str(error))
                except (RoundError, ProtocolViolation) as error:
                    self._post.events.emit("attempt_failed", round=round_.number, attempt=attempt, reason=str(error))
                if leader.ahead is not None:
                    self._here.look.set()
            else:
                self._here.phase = "training"
                await self._follow(height, attempt)
                if height.acceptor.promised <= attempt:
                    floor = (attempt // TRIES_PER_LEADER + 1) * TRIES_PER_LEADER

    async def _follow(self, height: RoundState, attempt: int) -> None:
        """Wait while the leader of `attempt` makes progress."""
        leader = height.head.leader(attempt).peer
        if height.awaits != leader:  # else it has its time: it may have been quicker than we are
            height.expect_progress_within(2 * self._post.tempo.answer_s, leader)
        async with trio.open_nursery() as nursery:
            if self._post.pace.pipeline:
                nursery.start_soon(self._see_whether_it_left, height, leader)
            while height.decided is None and height.acceptor.promised <= attempt:
                if leader in self._post.host.suspects or trio.current_time() > height.stage_deadline:
                    break
                await height.changed.until(lambda: height.decided is not None, 0.25)
            nursery.cancel_scope.cancel()

    async def _see_whether_it_left(self, height: RoundState, leader: str) -> None:
        """A leader that moves to another stage is alive, and leads no more: then its time is over."""
        ask = say.AskHead(height.head.run_id)
        while True:
            await trio.sleep(LEADER_LEFT_S)
            try:
                await self._post.host.rpc.call(leader, say.STANDING, ask, timeout_s=self._post.tempo.answer_s)
            except RemoteError as error:
                if error.code != BUSY:
                    height.expect_progress_within(0.0, leader)
                    return
            except BarnraiseError:
                continue  # the heartbeat will tell

    async def _knock(self, round_: Round) -> None:
        """A joiner's part: tell the members that we hold their head's state, until a round that has us is decided."""
        height, post = round_.height, self._post
        self._here.phase = "knocking"
        head = height.head
        knock = say.Knock(head.hash, head.round, post.me, post.host.addresses, head.run_id)
        while height.decided is None:
            doors = [*(m.peer for m in head.members), self._run.authority]
            async with trio.open_nursery() as nursery:
                for door in doors:
                    nursery.start_soon(self._knock_at, door, knock, head.height)
            await height.changed.until(lambda: height.decided is not None, KNOCK_EVERY_S)

    async def _knock_at(self, door: str, knock: say.Knock, height: tuple[int, int]) -> None:
        try:
            reply = await self._post.host.rpc.call(door, say.KNOCK, knock, timeout_s=self._post.tempo.answer_s)
        except BarnraiseError:
            return
        if reply.body.head.height > height:  # the authority's is that of the last regroup: older than ours, as a rule
            self._here.look.set()

    async def _look_around(self, round_: Round) -> HeadCandidate:
        """Look where the run stands when somebody seems to be further on, and now and then anyway; returns what is.

        Vain looks that others make us take come ever more slowly; a quiet while ends that, so that a joiner sees the
        next commit in time for the round after it."""
        head = round_.height.head
        pause_s = LOOK_PAUSE_S
        while True:
            with trio.move_on_after(LOOK_AROUND_S) as quiet:
                await self._here.look.wait()
            self._here.look = trio.Event()
            best, self._here.offer = self._here.offer or await self.best_sighting(), None
            if best is not None and best.head.height > head.height and best.head.hash != head.hash:
                return best
            if quiet.cancelled_caught:
                pause_s = LOOK_PAUSE_S
                continue
            await trio.sleep(pause_s)
            pause_s = min(2 * pause_s, LOOK_AROUND_S / 2)

    async def best_sighting(self) -> HeadCandidate | None:
        """The head that counts most among all the peers we know of."""
        me = self._post.me.peer
        peers = [m.peer for m in self.head.members] + [self._run.authority] + list(self._keeper.known_peers())
        suspects = self._post.host.suspects
        mine, view = (me, self._here.standing(self._post.me)), Viewpoint(self._post.me, self.head)

        def weighed(standings: list[tuple[str, say.HeadReport]], unheard: int = 0) -> list[HeadCandidate]:
            return weigh([*standings, mine], self._run.authority, self._run.genesis, view, unheard)

        def enough(standings: list[tuple[str, say.HeadReport]], unheard: int) -> bool:
            """A majority further on is worth following at once; whoever is frozen would hold up the answer. What only
            the authority of a pipeline's small groups remembers is often long past, and nobody has its state any more.
            """
            best = weighed(standings, unheard)[:1]
            past = self._post.pace.pipeline and best and set(best[0].holders) == {self._run.authority}
            if past and best[0].head.state_hash != self.head.state_hash:
                return False
            return any(s.head.height > self.head.height for s in best)

        others = [peer for peer in peers if peer != me and peer not in suspects]
        rpc, most = self._post.host.rpc, len(self.head.members) + ASKED_MAX
        sightings = weighed(await ask_standings(rpc, others, group=self.head.run_id, enough=enough, most=most))
        return sightings[0] if sightings else None

    async def _wait_for_majority(self, round_: Round, reason: str) -> None:
        """Too few members are left to go on: only the authority may regroup us. Wait, and say so."""
        self._here.phase = say.NO_MAJORITY
        self._post.events.emit("majority_lost", round=round_.number, reason=reason)
        try:
            ask = say.AskHead(self.head.run_id)
            reply = await self._post.host.rpc.call(
                self._run.authority, say.NEED_REGROUP, ask, timeout_s=self._post.tempo.answer_s
            )
            if reply.body.head.height > round_.height.head.height:
                self._here.look.set()
        except BarnraiseError as error:
            self._post.events.emit("authority_unreachable", round=round_.number, reason=str(error))
        await trio.sleep(ASK_AUTHORITY_EVERY_S)

    # -- changing heads ----------------------------------------------------------------------------------------------

    async def _commit(self, round_: Round, head: Head) -> None:
        exchange = round_.height.sealed_by
        assert exchange is not None
        self._post.state.commit(head.state_hash)
        self._here.head = head
        round_.end(head)
        self._here.knockers.settle(exchange.merge.plan, head)
        self.counted = tuple(body.counted for body in exchange.merge.merged())
        results = [exchange.results[i] for i in sorted(exchange.results)]
        await self._keeper.committed(head, results)

    async def _catch_up(self, height: RoundState, sighting: HeadCandidate) -> None:
        """Move to a head that others committed: by our own sealed result, by a change of term, or by fetching. If that
        fails we stay where we are, unless the state has moved on part of the way."""
        self._here.phase = "catching up"
        state = self._post.state
        while True:
            head = sighting.head
            try:
                if head.state_hash == state.tree.root:
                    break
                if height.sealed is not None and height.sealed.hash == head.hash:
                    state.commit(head.state_hash)
                else:
                    height.sealed = None  # its state is written over by what is fetched
                    await self._keeper.fetch(sighting, self.head)
                break
            except (NetworkError, ProtocolViolation) as error:
                self._post.events.emit("catch_up_failed", round=head.round, reason=str(error))
                await trio.sleep(KNOCK_EVERY_S)
            if state.tree.root == self.head.state_hash:
                return
            sighting = await self.best_sighting() or sighting
        self._here.head, self._here.regroup = head, sighting.regroup
        await self._keeper.committed(head, [])

    async def _serve_stragglers(self) -> None:
        """The run is complete: stay until every member of the last head is there too, but not for ever."""
        rpc, head, me = self._post.host.rpc, self.head, self._post.me
        missing = {member.peer for member in head.members if member != me}
        with trio.move_on_after(4 * self._post.tempo.answer_s):
            while missing:  # whoever was seen there may leave before the others are, or before we have seen it
                gone: set[str] = set()
                standings = await ask_standings(rpc, missing, group=head.run_id, most=len(missing), gone=gone)
                missing -= gone.union(peer for peer, standing in standings if standing.head.hash == head.hash)
                if missing:
                    await trio.sleep(SEE_OFF_EVERY_S)
