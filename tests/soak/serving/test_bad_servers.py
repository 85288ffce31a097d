"""A real server that misbehaves beside an honest one of the same blocks: every answer is right, and soon as quick as
without it. The same with more modes and a clock of its own: tests/swarm/inference/test_bad_servers.py."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Final

import pytest
import trio

from peer.ipc.sampling_options import Sampling
from swarm.inference.client import ModelClient
from swarm.inference.messages import StartSession
from tests.soak.serving.bad_block_server import MODES, VARIABLE
from tests.support.process_group import Launch
from tests.swarm.serving.serving_swarm import ServingSwarm, open_serving, reference_tokens

pytestmark = [pytest.mark.soak, pytest.mark.process]
ANSWERS: Final = 20
TOKENS: Final = 16
ALTERNATING: Final = ",".join(MODES)


async def asked(model: ModelClient, number: int) -> float:
    """Have an answer computed and check it; return its seconds."""
    prompt = [(number * 31 + at) % 300 for at in range(20)]
    began, session = time.monotonic(), model.session(Sampling())
    with trio.fail_after(120):
        said = [drawn.token async for drawn in session.generate(prompt, TOKENS)]
    session.close()
    assert said == reference_tokens(prompt, TOKENS)
    return time.monotonic() - began


async def quiet_s(swarm: ServingSwarm) -> float:
    """Return what an answer takes while all are honest."""
    async with swarm.client() as model:
        return max([await asked(model, number) for number in range(5)])


@pytest.mark.parametrize("blocks", ["0:3", "3:6", "0:6"])
@pytest.mark.parametrize("modes", [*MODES, ALTERNATING])
async def test_one_bad_server(tmp_path: Path, modes: str, blocks: str) -> None:
    def launch(name: str) -> Launch:
        bad = Launch(module="tests.soak.serving.bad_block_server", environment={VARIABLE: modes})
        return bad if name == "bad" else Launch()

    async with open_serving(tmp_path, launch, s0="0:3", s1="3:6") as swarm:
        usual_s = await quiet_s(swarm)
        await swarm.serve("bad", blocks)
        async with swarm.client() as model:
            starts = count_starts(model)
            began = time.monotonic()
            took = [await asked(model, number) for number in range(ANSWERS)]
            each_s = len(starts) / (time.monotonic() - began)
    then = f"{took[0]:5.2f} s, then {max(took[1:]):5.2f} (quiet {usual_s:.2f})"
    print(f"  {modes:>10.10} {blocks}: {then}; {len(starts)} starts", flush=True)
    assert took[0] < 10 and max(took[1:]) < usual_s + 1
    assert len(starts) < 2 * ANSWERS + 5 * sum(took), each_s


def count_starts(model: ModelClient) -> list[StartSession]:
    """Return what will hold all that the client says to begin or wire a session."""
    starts = list[StartSession]()
    open_flow = model.server_flows.open

    async def counted(peer: str) -> object:
        flow = await open_flow(peer)
        if not hasattr(flow, "_counted"):
            send = flow.send

            def told(message: object, payload: bytes = b"") -> None:
                if isinstance(message, StartSession):
                    starts.append(message)
                send(message, payload)  # type: ignore[arg-type]

            flow.send = told  # type: ignore[method-assign,assignment]
            flow._counted = True  # type: ignore[attr-defined]
        return flow

    model.server_flows.open = counted  # type: ignore[method-assign,assignment]
    return starts
