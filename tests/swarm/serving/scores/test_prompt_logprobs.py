"""Log-probabilities of prompts from real servers, against those of `transformers`, also where one is killed midway."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
import torch
import trio

from peer.ipc.sampling_options import Sampling
from swarm.inference.client import ModelClient
from swarm.inference.messages import PromptLogprobs
from swarm.inference.session import RemoteSession
from tests.swarm.serving.serving_swarm import CONTEXT, open_serving, reference_model

pytestmark = pytest.mark.process

PROMPT = [(7 * at * at + 3 * at) % 256 for at in range(CONTEXT - 2)]
COUNT = 4


@cache
def by_transformers(prompt: tuple[int, ...]) -> torch.Tensor:
    """Return the log-probabilities of what follows each position, (positions, vocab_size)."""
    with torch.no_grad():
        return torch.log_softmax(reference_model()(torch.tensor([prompt])).logits[0], -1)


def likeliest_after(prompt: list[int]) -> list[int]:
    return [int(by_transformers(tuple(prompt))[-1].argmax())]


async def scored(model: ModelClient, session: RemoteSession, prompt: list[int]) -> int:
    """Check the scores of a prompt; return the token after it."""
    right = by_transformers(tuple(prompt))
    with trio.fail_after(300):
        (drawn,) = [drawn async for drawn in session.generate(prompt, 1)]
    session.close()
    first, *found = session.drawing.scores.of(prompt)
    assert (first.token, first.logprob, len(found)) == (prompt[0], None, len(prompt) - 1)
    if not found:
        return drawn.token
    values = torch.tensor([one.logprob for one in found])
    assert torch.allclose(values, right[torch.arange(len(found)), torch.tensor(prompt[1:])], atol=1e-4)
    likeliest = torch.tensor([[value for _, value in one.likeliest] for one in found])
    assert torch.allclose(likeliest, right[:-1].topk(COUNT).values, atol=1e-4)
    ids = torch.tensor([[token for token, _ in one.likeliest] for one in found])
    assert torch.allclose(right[:-1].gather(1, ids), likeliest, atol=1e-4)
    return drawn.token


@pytest.mark.parametrize(
    "servers", [pytest.param({"whole": "0:6"}, marks=pytest.mark.soak), {"s0": "0:3", "s1": "3:6"}]
)
async def test_every_position_is_scored_as_transformers_does(tmp_path: Path, servers: dict[str, str]) -> None:
    """Twice, so that kept pages would be there; beside a session that uses them."""
    async with open_serving(tmp_path, **servers) as swarm, swarm.client() as model:
        for prompt in (PROMPT, PROMPT, PROMPT[:1], PROMPT[:2]):
            session = model.session(Sampling(logprobs=COUNT, prompt_logprobs=True))
            assert [await scored(model, session, prompt)] == likeliest_after(prompt)
            plain = model.session(Sampling())
            assert [drawn.token async for drawn in plain.generate(prompt, 1)] == likeliest_after(prompt)
            plain.close()


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.soak), 1])
async def test_a_server_that_is_killed_midway_costs_no_position(tmp_path: Path, place: int) -> None:
    async with open_serving(tmp_path, s0="0:3", s1="3:6", s2="0:3", s3="3:6") as swarm, swarm.client() as model:
        session = model.session(Sampling(logprobs=COUNT, prompt_logprobs=True))
        take, came = session.drawing.scores.take, list[int]()

        def seen(message: PromptLogprobs) -> bool:
            if not came:
                swarm.servers[swarm.name_of(model, session.route[place].peer)].kill()
            came.append(message.position)
            return take(message)

        session.drawing.scores.take = seen  # type: ignore[method-assign]
        assert [await scored(model, session, PROMPT)] == likeliest_after(PROMPT)
        assert came[0] == 1 and (session.failovers >= 1 or place == 0)
