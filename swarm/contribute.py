"""From an assignment to a signed commitment: train, encode, hash. What a contributor does before anybody exchanges."""

from __future__ import annotations

import math

import trio

from peer.errors import BarnraiseError, WorkerError
from peer.identity import Signed, sign_body
from swarm.exchange import encode_slices
from swarm.plan import CONTRIBUTION_KIND, Contribution, SliceMap, WorkPlan
from swarm.post import Post
from swarm.trainer import Work


async def contribute(post: Post, plan: WorkPlan, first_step: int, cut: SliceMap) -> tuple[Signed, list[memoryview]]:
    """Do this peer's part of `plan`. Returns the signed `Contribution` and its encoded slices.

    A worker that fails, or a pseudo-gradient that is not finite, makes a contribution of nothing: the peer stays in the
    group, owns slices and votes.
    """
    assignment = plan.of(post.me)
    assert assignment is not None
    slices: list[memoryview] = []
    hashes: list[bytes] = []
    sqnorms: list[float] = []
    work: Work | None = None
    try:
        work = await post.trainer.train(assignment, first_step, plan.deadline_s)
        if work.steps:
            slices, hashes, sqnorms = await trio.to_thread.run_sync(encode_slices, work.delta, cut, post.spec.up)
    except WorkerError as error:
        post.events.emit("worker_failed", round=plan.round, reason=str(error))
    except BarnraiseError as error:
        post.events.emit("update_unusable", round=plan.round, reason=str(error))
    usable = work if slices else None
    body = Contribution(
        head=plan.head,
        plan=plan.hash,
        member=post.me,
        steps=usable.steps if usable else 0,
        samples=usable.samples if usable else 0,
        loss=usable.loss if usable and math.isfinite(usable.loss) else 0.0,
        hashes=tuple(hashes),
        sqnorms=tuple(sqnorms),
    )
    return sign_body(post.identity, CONTRIBUTION_KIND, body), slices
