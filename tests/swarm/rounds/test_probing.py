"""A replica that moves to another stage during a round is alive, but its old group does not wait for it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from swarm.protocol.ledger import Range
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainer import TrainRequest
from tests.swarm.pipeline.test_stage_groups import LATER, NUMEL, scripted, unused
from tests.swarm.support.group import StageReplica, open_group

ENDLESS_S = 600.0


class Endless(AdaptiveTimeouts):
    """Timeouts longer than the test."""

    def __init__(self) -> None:
        super().__init__(timeout_floor_s=ENDLESS_S)


def leads(replica: StageReplica) -> bool:
    return any(event.fields["phase"] == "plan" for event in replica.seen("phase_entered"))


@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
async def test_a_member_that_left_the_group_is_not_waited_for(
    tmp_path: Path, leader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.rounds.collect.FINISH_EARLY_WAIT_S", ENDLESS_S)
    left = trio.Event()
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, NUMEL, "fp32", 1, 3))
        group.schedule, group.timeouts = LATER, Endless
        replicas = [await stack.enter_async_context(group.join(unused)) for _ in range(3)]

        async def script(number: int, order: TrainRequest) -> tuple[Range, ...]:
            if not left.is_set() and leads(replicas[number]) == leader:
                leave(replicas[number])
                left.set()
                await trio.sleep_forever()
            await left.wait()
            return ((4 * number, 4 * number + 4),)

        for number, replica in enumerate(replicas):
            scripted(replica, number, script)
        scopes = {replica.host.peer_id: trio.CancelScope() for replica in replicas}

        async def run(replica: StageReplica) -> None:
            with scopes[replica.host.peer_id]:
                await replica.engine.run()

        def leave(replica: StageReplica) -> None:
            server = replica.host.rpc.server
            for name in [name for name in server._methods if name.startswith(("round.", "run.", "exchange."))]:
                server._methods.pop(name).withdraw()
            scopes[replica.host.peer_id].cancel()

        async with trio.open_nursery() as nursery:
            for replica in replicas:
                nursery.start_soon(run, replica)
            with trio.fail_after(120):
                await left.wait()
                while sum(replica.engine.head.round == 1 for replica in replicas) < 2:
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
