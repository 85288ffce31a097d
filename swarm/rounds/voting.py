"""A member's vote: cast, told to the group until it counts, and counted."""

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
    """`overtaken` is called when a peer seems to be further on. Votes go out in `lingering`, which outlives the
    round."""

    def __init__(
        self, post: RoundContext, height: RoundState, lingering: trio.Nursery, overtaken: Callable[[], object]
    ) -> None:
        self._post = post
        self._height = height
        self._lingering = lingering
        self._overtaken = overtaken

    async def cast(self, attempt: int, head: Head, roster: bytes) -> None:
        """Vote, tell the group, and keep asking until the round is decided: an answer may show that others
        committed."""
        height, me = self._height, self._post.me
        if not height.acceptor.accept(attempt, head, roster):
            return
        choice = head.hash
        height.votes.record(me, attempt, choice)
        vote = Vote(height.head.hash, attempt, choice, me)
        while height.decided is None and height.acceptor.promised == attempt:
            self._lingering.start_soon(self._tell_all, vote, head)  # goes out even if it decides the round here
            self.count()
            await height.changed.until(lambda: height.decided is not None, VOTE_RETRY_S)

    def take(self, vote: Vote, sender: str) -> None:
        """Another member's vote."""
        if vote.member.peer != sender:
            raise ProtocolViolation("a vote names another member than its sender")
        self._height.votes.record(vote.member, vote.attempt, vote.choice)
        self.count()

    def count(self) -> None:
        """Decide the round if a majority chose the head that the next state stands for here."""
        height = self._height
        chosen = height.votes.chosen
        if chosen is not None and height.sealed is not None and height.sealed.hash == chosen:
            height.decided = height.sealed
            height.changed.notify()

    async def _tell_all(self, vote: Vote, head: Head) -> None:
        voters = {m.peer: m for m in (*self._height.head.members, *head.members)}
        async with trio.open_nursery() as nursery:
            for peer, member in voters.items():
                if peer != self._post.me.peer and peer not in self._post.host.suspects:
                    nursery.start_soon(self._tell, member, vote)
        faults.reach("after_vote", self._height.head.round + 1)

    async def _tell(self, voter: Member, vote: Vote) -> None:
        try:
            reply: Reply[VoteSeen] = await self._post.host.rpc.call(
                voter.peer, VOTE, vote, timeout_s=self._post.tempo.answer_s
            )
        except BarnraiseError:
            return
        if reply.body.current not in (vote.choice, vote.head):
            self._overtaken()
        if reply.body.current == vote.choice:  # committed there: it has seen a majority, its own vote included
            self._height.votes.record(voter, vote.attempt, vote.choice)
            self.count()
