"""Phase 1 of an attempt: collect promises from the members of the head, and from peers that ask to join."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

import trio

from peer.errors import BarnraiseError, NoQuorum, RoundError
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import PREPARE, Prepare, Promise
from swarm.rounds.round import Round

JOINER_GRACE_S: Final = 1.5  # for answers of joiners, after the members have answered


async def collect_promises(round_: Round, attempt: int, joiners: Iterable[str]) -> list[Promise]:
    """Ask the members and the joiners (peer ids) for promises; return the answers, this peer's own first.

    An answer is a promise, a refusal, or the sender's head if that is another one."""
    context, head = round_.context, round_.round_state.head
    me, host = context.me, context.host
    wanted = {m.peer for m in head.members}
    joiners = [peer for peer in joiners if peer not in wanted]
    addresses = {peer: host.book.get(peer) for peer in (*(m.peer for m in head.members), *joiners) if peer != me.peer}
    addresses[me.peer] = host.addresses
    ask = Prepare(head, attempt, addresses)
    waiting = {peer for peer in wanted if peer != me.peer and peer not in host.suspects}
    answers = [round_.promise(ask, me.peer)]

    async def ask_one(peer: str) -> None:
        try:
            reply = await host.rpc.call(peer, PREPARE, ask, timeout_s=context.timeouts.answer_s)
            if reply.body.member.peer == peer and reply.body.head.run_id == head.run_id:
                answers.append(reply.body)
        except BarnraiseError as error:
            context.events.emit("prepare_unanswered", round=round_.number, peer=peer, reason=str(error))
        waiting.discard(peer)
        if not waiting:
            nursery.cancel_scope.deadline = min(nursery.cancel_scope.deadline, trio.current_time() + grace_s())

    def grace_s() -> float:
        """Without a majority of the members no joiner can be taken in."""
        return JOINER_GRACE_S if sum(map(head.has, granted_by(answers, head))) >= head.quorum else 0.0

    async with trio.open_nursery() as nursery:
        if not waiting:
            nursery.cancel_scope.deadline = trio.current_time() + grace_s()
        for peer in [*waiting, *joiners]:
            nursery.start_soon(ask_one, peer)
    return answers


def granted_by(answers: Iterable[Promise], head: Head) -> dict[Member, Promise]:
    """Return the granted promises of the round after `head`, by member."""
    return {answer.member: answer for answer in answers if answer.granted and answer.head.hash == head.hash}


def later_head(answers: Iterable[Promise], head: Head) -> Head | None:
    """Return a head after `head` that an answer names, if there is one."""
    return next((answer.head for answer in answers if answer.head.position > head.position), None)


def require_quorum(answers: Sequence[Promise], head: Head, attempt: int) -> None:
    """Raise `RoundError` if the attempt cannot succeed: `NoQuorum` if too few members answered."""
    granted = sum(map(head.has, granted_by(answers, head)))
    if granted >= head.quorum:
        return
    refusals = [answer for answer in answers if answer.head.hash == head.hash and not answer.granted]
    if later_head(answers, head) is not None or any(refusal.promised > attempt for refusal in refusals):
        raise RoundError("other members have reached a later head or attempt")
    if granted + len(refusals) >= head.quorum:
        raise RoundError("other members follow another leader")
    raise NoQuorum(f"{granted} of {len(head.members)} members answered, {head.quorum} are needed")
