"""A leader's question in a synchronous pipeline: have the members together counted the whole batch?

It is asked outside the node, since the samples are counted by the trainers; what follows from the answer, the node
decides (`swarm.protocol.claims`).
"""

from __future__ import annotations

from collections.abc import Callable

import trio

from swarm.protocol.agreement import events
from swarm.protocol.plan import WorkPlan
from swarm.rounds.group_driver import GroupDriver
from swarm.rounds.trainers.trainer import Trainer


async def gather_batches(
    group: GroupDriver, trainer: Trainer, plan: Callable[[], WorkPlan | None], until_s: float = 1.0
) -> None:
    """Ask the trainer while this peer leads, and tell the node. It is asked once a plan, and again if another peer has
    led in between. Runs until cancelled."""
    told = b""

    def current() -> WorkPlan | None:
        mine = plan()
        return mine if mine is not None and group.phase == "leading" and mine.head == group.head.hash else None

    async def ask(mine: WorkPlan, peers: list[str], scope: trio.CancelScope) -> None:
        nonlocal told
        claims = await trainer.gather(peers)
        told = mine.hash
        group.feed(events.Gathered(mine.head, {peer: tuple(own) for peer, own in (claims or {}).items()}))
        scope.cancel()

    while True:
        mine = current()
        if mine is None or mine.hash == told:
            await group.changed.wait(until_s)
            continue
        peers = group.workers
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, mine, peers, nursery.cancel_scope)
            while (now := current()) is not None and now.hash == mine.hash:
                peers[:] = group.workers  # a newcomer may bring samples that no other will count
                await group.changed.wait(until_s)
            nursery.cancel_scope.cancel()
