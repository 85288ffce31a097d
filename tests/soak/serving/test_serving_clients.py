"""Clients of a served model that are killed or frozen in the middle of answers, and a model whose founder leaves."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import pairwise
from pathlib import Path
from typing import Final

import pytest
import trio

from peer.ipc.sampling_options import Sampling
from swarm.inference.client import ModelClient
from tests.swarm.serving.serving_swarm import LAYERS, ServingSwarm, open_serving, reference_tokens
from tests.swarm.serving.test_serving import PROMPT, WARM, all_pages_free, ask, say

pytestmark = [pytest.mark.soak, pytest.mark.process]
ROUNDS: Final = 10
STRIKES: Final = (signal.SIGKILL, signal.SIGKILL, signal.SIGSTOP)
"""What becomes of the clients of one round."""
STRIKE_AT: Final = 20
TOKENS: Final = 100
FREE_S: Final = 10.0
GENERATE: Final = (sys.executable, "-m", "cli.main", "generate")


async def test_clients_that_are_killed_or_frozen_free_their_room_in_ten_seconds(tmp_path: Path) -> None:
    """Twenty are killed and ten frozen, three at a time, while two others get their tokens."""
    async with open_serving(tmp_path, s0="0:3", s1="3:6") as swarm, AsyncExitStack() as stack:
        models = [await stack.enter_async_context(swarm.client()) for _ in range(2)]
        slowest_s, count = 0.0, 0
        for _ in range(ROUNDS):
            async with answering(swarm, models[0]) as doomed:
                dropped = await one_round(swarm, models, doomed)
                slowest_s, count = max(slowest_s, *dropped), count + len(dropped)
        print(f"  {count} sessions dropped, the last one of a round after {slowest_s:.1f} s at most", flush=True)
        assert slowest_s < FREE_S


async def one_round(swarm: ServingSwarm, models: Sequence[ModelClient], doomed: Sequence[trio.Process]) -> list[float]:
    """Strike the doomed clients in the middle of the others' answers; return after how many seconds each of their
    sessions was dropped."""
    struck_at, said = list[float](), dict[int, list[int]]()

    def strike() -> None:
        for process, how in zip(doomed, STRIKES, strict=True):
            process.send_signal(how)
        struck_at.append(time.time())

    async def one(number: int) -> None:
        session = models[number].session(Sampling())
        said[number] = await say(session, [*PROMPT, number], TOKENS, {STRIKE_AT: strike} if number == 0 else None)
        session.close()

    async with trio.open_nursery() as nursery:
        for number in range(len(models)):
            nursery.start_soon(one, number)
    assert said == {number: reference_tokens([*PROMPT, number], TOKENS) for number in range(len(models))}
    await all_pages_free(swarm, models[0])  # not timed: records of dead peers make the look-up slow
    facts = (fact for server in swarm.servers.values() for fact in server.all("session_dropped"))
    return [fact.at - struck_at[0] for fact in facts if fact.at > struck_at[0]]


@asynccontextmanager
async def answering(swarm: ServingSwarm, model: ModelClient) -> AsyncIterator[list[trio.Process]]:
    """Clients of one round, all of them in the middle of an answer. They end with the block, frozen ones too."""
    command = [*GENERATE, str(swarm.invite), "Once", "--max-tokens", "4000", "--n", "64"]
    doomed = list[trio.Process]()
    try:
        for _ in STRIKES:
            doomed.append(await trio.lowlevel.open_process(command, stdout=-3, stderr=-3))
        with trio.fail_after(120):
            while any(record.sessions < len(doomed) for record in model.servers.records.values()):
                await model.servers.refresh(0.0)
        yield doomed
    finally:
        for process in doomed:
            process.kill()
        with trio.CancelScope(shield=True):
            for process in doomed:
                await process.wait()


@pytest.mark.parametrize("servers", [3, 4])
async def test_a_model_goes_on_without_its_founder(tmp_path: Path, servers: int) -> None:
    """The others have fetched their blocks from it. One that comes when it has left fetches its own from them."""
    cuts = [round(LAYERS * number / servers) for number in range(servers + 1)]
    async with open_serving(tmp_path, founder=f"0:{LAYERS}") as swarm:
        for number, (first, end) in enumerate(pairwise(cuts)):
            await swarm.serve(f"s{number}", f"{first}:{end}")
        async with swarm.client() as model:
            undisturbed = await ask(model, PROMPT, 400, WARM)
            session = model.session(WARM)
            said = await say(session, PROMPT, 400, {50: swarm.servers["founder"].interrupt})
            session.close()
            assert said == undisturbed and await swarm.servers["founder"].wait_exit() == 130
            late = await swarm.serve("late", f"{cuts[1]}:{cuts[2]}")
            swarm.servers["s1"].kill()
            assert late.alive and await ask(model, PROMPT, 48) == reference_tokens(PROMPT, 48)
            assert len(model.servers.records) >= servers
