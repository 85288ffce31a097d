"""A replica that moves to another stage in the middle of a round is alive, and yet nobody waits for it."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio

from swarm.protocol.ledger import Range
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.trainer import Order
from tests.swarm.pipeline.test_stage_groups import LATER, NUMEL, scripted, unused
from tests.swarm.support.group import StageReplica, open_group

ENDLESS_S = 600.0


class Endless(AdaptiveTimeouts):
    """Whoever is waited for is waited for until the test fails."""

    def __init__(self) -> None:
        super().__init__(patience_s=ENDLESS_S)


def leads(seat: StageReplica) -> bool:
    return any(event.fields["phase"] == "plan" for event in seat.seen("phase_entered"))


@pytest.mark.parametrize("leader", [False, True], ids=["member", "leader"])
async def test_nobody_waits_for_who_has_left_the_group(
    tmp_path: Path, leader: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swarm.rounds.collect.WRAP_UP_WAIT_S", ENDLESS_S)
    left = trio.Event()
    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, NUMEL, "fp32", 1, 3))
        group.pace, group.tempo = LATER, Endless
        seats = [await stack.enter_async_context(group.join(unused)) for _ in range(3)]

        async def script(number: int, order: Order) -> tuple[Range, ...]:
            if not left.is_set() and leads(seats[number]) == leader:
                leave(seats[number])
                left.set()
                await trio.sleep_forever()
            await left.wait()
            return ((4 * number, 4 * number + 4),)

        for number, seat in enumerate(seats):
            scripted(seat, number, script)
        scopes = {seat.host.peer_id: trio.CancelScope() for seat in seats}

        async def run(seat: StageReplica) -> None:
            with scopes[seat.host.peer_id]:
                await seat.engine.run()

        def leave(seat: StageReplica) -> None:
            server = seat.host.rpc.server
            for name in [name for name in server._methods if name.startswith(("round.", "run.", "exchange."))]:
                server._methods.pop(name).withdraw()
            scopes[seat.host.peer_id].cancel()

        async with trio.open_nursery() as nursery:
            for seat in seats:
                nursery.start_soon(run, seat)
            with trio.fail_after(120):
                await left.wait()
                while sum(seat.engine.head.round == 1 for seat in seats) < 2:
                    await trio.sleep(0.02)
            nursery.cancel_scope.cancel()
