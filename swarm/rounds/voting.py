"""A member's vote: cast it, send it until the round is decided, and count the votes of others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from peer import faults
from peer.errors import BarnraiseError, ProtocolViolation
from peer.net.rpc import Reply
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import VOTE, Vote, VoteSeen
from swarm.rounds.context import RoundContext
from swarm.rounds.round_state import RoundState

VOTE_RETRY_S: Final = 1.0


class Voting:
    """Casts and counts votes of one round. `overtaken` is called when a peer seems to have a later head. Votes are sent
    in `lingering`, a nursery that outlives the round."""

    def __init__(
        self, context: RoundContext, round_state: RoundState, lingering: trio.Nursery, overtaken: Callable[[], object]
    ) -> None:
        self._context = context
        self._round_state = round_state
        self._lingering = lingering
        self._overtaken = overtaken

    async def cast(self, attempt: int, head: Head, roster: bytes) -> None:
        """Vote and send the vote until the round is decided. An answer may show that another member has committed."""
        round_state, me = self._round_state, self._context.me
        if not round_state.acceptor.accept(attempt, head, roster):
            return
        choice = head.hash
        round_state.votes.record(me, attempt, choice)
        vote = Vote(round_state.head.hash, attempt, choice, me)
        while round_state.decided is None and round_state.acceptor.promised == attempt:
            self._lingering.start_soon(self._tell_all, vote, head)  # it is sent even if it decides the round here
            self.count()
            await round_state.changed.until(lambda: round_state.decided is not None, VOTE_RETRY_S)

    def take(self, vote: Vote, sender: str) -> None:
        """Record another member's vote."""
        if vote.member.peer != sender:
            raise ProtocolViolation("a vote names another member than its sender")
        self._round_state.votes.record(vote.member, vote.attempt, vote.choice)
        self.count()

    def count(self) -> None:
        """Decide the round if a majority chose this member's candidate head."""
        round_state = self._round_state
        chosen = round_state.votes.chosen
        if chosen is not None and round_state.candidate is not None and round_state.candidate.hash == chosen:
            round_state.decided = round_state.candidate
            round_state.changed.notify()

    async def _tell_all(self, vote: Vote, head: Head) -> None:
        voters = {m.peer: m for m in (*self._round_state.head.members, *head.members)}
        async with trio.open_nursery() as nursery:
            for peer, member in voters.items():
                if peer != self._context.me.peer and peer not in self._context.host.suspects:
                    nursery.start_soon(self._tell, member, vote)
        faults.reach("after_vote", self._round_state.head.round + 1)

    async def _tell(self, voter: Member, vote: Vote) -> None:
        try:
            reply: Reply[VoteSeen] = await self._context.host.rpc.call(
                voter.peer, VOTE, vote, timeout_s=self._context.timeouts.answer_s
            )
        except BarnraiseError:
            return
        if reply.body.current not in (vote.choice, vote.head):
            self._overtaken()
        if reply.body.current == vote.choice:  # the voter has committed, so it has voted for this head
            self._round_state.votes.record(voter, vote.attempt, vote.choice)
            self.count()
