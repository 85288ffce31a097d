"""From an assignment to a signed commitment: train, encode, hash. What a contributor does before anybody exchanges."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import trio
from blake3 import blake3

from optim.strategies.interface import Coding, Turn
from peer.errors import BarnraiseError, WorkerError
from peer.identity import Signed, sign_body
from peer.net.wire import allocate
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution, WorkPlan
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange import as_bytes
from swarm.rounds.trainer import Order, Work


@dataclass(frozen=True)
class Message:
    """What a peer has to say in a round: its encoded slices, their blake3 hashes and squared norms. `before`: in a
    pipeline, what the method remembered before it."""

    turn: Turn
    coding: Coding
    slices: Sequence[memoryview]
    hashes: tuple[bytes, ...]
    sqnorms: tuple[float, ...]
    before: tuple[torch.Tensor, ...] = ()


class Contributor:
    """Makes a peer's contributions, one at a time, and sees to it that what a method keeps between its messages stays
    true: what was in a message that was not merged is in the next one. In a pipeline the trainer sees to that, or to
    its being counted elsewhere: there the method forgets the message."""

    def __init__(self, post: RoundContext) -> None:
        self._post = post
        self._returned: deque[Message] = deque()

    async def contribute(
        self, plan: WorkPlan, turn: Turn, coding: Coding, hurried: bool
    ) -> tuple[Signed, Message | None]:
        """Do this peer's part of `plan`, or (`hurried`) take what there is. Returns the signed `Contribution` and the
        message it commits to.

        A worker that fails, or a product that is not finite, makes a contribution of nothing: the peer stays in the
        group, owns slices and votes.
        """
        post = self._post
        assignment = plan.of(post.me)
        assert assignment is not None
        work: Work | None = None
        message: Message | None = None
        try:
            order = Order(assignment, turn, coding.places, len(plan.assignments), plan.deadline_s, hurried)
            work = await post.trainer.train(order)
            if work.steps:
                message = await trio.to_thread.run_sync(self._encode, turn, coding, work.product)
        except WorkerError as error:
            post.events.emit("worker_failed", round=plan.round, reason=str(error))
        except BarnraiseError as error:
            post.events.emit("update_unusable", round=plan.round, reason=str(error))
        usable = work if message else None
        body = Contribution(
            head=plan.head,
            plan=plan.hash,
            member=post.me,
            steps=usable.steps if usable else 0,
            samples=usable.samples if usable else 0,
            loss=usable.loss if usable and math.isfinite(usable.loss) else 0.0,
            hashes=message.hashes if message else (),
            sqnorms=message.sqnorms if message else (),
            counted=usable.counted if usable else (),
        )
        return sign_body(post.identity, CONTRIBUTION_KIND, body), message

    def give_back(self, message: Message) -> None:
        """That message was not merged."""
        self._returned.append(message)

    def _encode(self, turn: Turn, coding: Coding, product: torch.Tensor) -> Message:
        recipe, pipeline = self._post.state.recipe, self._post.pace.pipeline
        while self._returned:
            lost = self._returned.pop()  # the last one first: what was before it holds what came before that
            if pipeline:
                for vector, was in zip(recipe.memory(lost.coding), lost.before, strict=True):
                    vector.copy_(was)
            else:
                recipe.take_back(lost.turn, lost.coding, lost.slices)
        before = tuple(vector.clone() for vector in recipe.memory(coding)) if pipeline else ()
        sizes = [coding.message_bytes(index) for index in range(coding.count)]
        room = torch.frombuffer(allocate(sum(sizes)), dtype=torch.uint8).split(sizes)
        sqnorms = recipe.encode(turn, coding, product, room)
        slices = [as_bytes(piece) for piece in room]
        return Message(turn, coding, slices, tuple(blake3(s).digest() for s in slices), tuple(sqnorms), before)
