"""A late joiner fetches the state from several donors, of which one dies and one lies, and then takes part."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, cast

import torch
import trio

from peer.checkpoint.hash_tree import MIN_CHUNK
from peer.net.method import Call
from swarm.protocol.plan import Assignment
from tests.swarm.support.group import InventedTrainer, StageReplica, open_group

NUMEL = 2_000_000  # 16 MB of state, in chunks enough for all donors


def deltas(peer: str, first_step: int, assignment: Assignment) -> torch.Tensor:
    seed = sum(peer.encode()) * 1000 + first_step
    return torch.randn(NUMEL, generator=torch.Generator().manual_seed(seed)) * 1e-2


def instead(replica: StageReplica, answer: Any) -> None:
    """Let a donor answer requests for chunks with `answer(call, honest handler)`."""
    served = replica.host.rpc.server._methods["state.chunk"]
    honest = served.handler
    served.handler = lambda call: answer(call, honest)


async def corrupt(call: Call[Any], honest: Any) -> Any:
    answer = await honest(call)
    return (answer[0], bytes(len(answer[1]))) if isinstance(answer, tuple) else answer


async def test_a_late_joiner_survives_a_dead_and_a_lying_donor(tmp_path: Path) -> None:
    asked = trio.Event()

    async def never(call: Call[Any], honest: Any) -> Any:
        asked.set()
        await trio.sleep_forever()

    async def not_before_it(call: Call[Any], honest: Any) -> Any:
        await asked.wait()  # else these two might serve everything before the other two are asked
        while not late.seen("peer_penalized"):
            await trio.sleep(0.02)
        return await honest(call)

    async with AsyncExitStack() as stack:
        group = await stack.enter_async_context(open_group(tmp_path, NUMEL, rounds=12, min_peers=4))
        replicas = [await stack.enter_async_context(group.join(deltas)) for _ in range(3)]
        late = await stack.enter_async_context(group.join(deltas))
        instead(replicas[2], corrupt)
        for replica in replicas[:2]:
            instead(replica, not_before_it)
        gate, kill = trio.Event(), trio.CancelScope()

        def hold(replica: StageReplica) -> None:
            """Stop it after its fifth round at the latest: all donors must hold the same state when the joiner asks."""
            trainer = cast(InventedTrainer, replica.context.trainer)
            trainer.gate, trainer.gated_from = gate, 6

        async def live_until_killed(task_status: trio.TaskStatus[StageReplica]) -> None:
            with kill:
                async with group.join(deltas) as replica:
                    instead(replica, never)
                    hold(replica)
                    task_status.started(replica)
                    await replica.engine.run()

        with trio.fail_after(180):
            async with trio.open_nursery() as nursery:
                doomed = await nursery.start(live_until_killed)
                for replica in replicas:
                    hold(replica)
                    nursery.start_soon(replica.engine.run)
                # more rounds than replay covers
                while any(replica.engine.head.round < 5 for replica in (*replicas, doomed)):
                    await trio.sleep(0.02)
                nursery.start_soon(late.engine.run)
                await asked.wait()
                kill.cancel()
                while late.engine.head.round < 5:
                    await trio.sleep(0.02)
                gate.set()
        final = replicas[0].engine.head
        assert final.round == 12 and all(replica.engine.head == final for replica in (*replicas, late))
        assert final.has(late.context.me) and not final.has(doomed.context.me)
        assert torch.equal(late.context.state.theta, replicas[0].context.state.theta)
        penalized = {event.fields["peer"] for event in late.seen("peer_penalized")}
        assert penalized == {replicas[2].host.peer_id}
        gave = {
            replica.host.peer_id: late.host.bytes_by_peer[replica.host.peer_id].bytes_down for replica in replicas[:2]
        }
        assert all(received > MIN_CHUNK for received in gave.values()), gave
