"""Answers that follow a schema, drawn by real servers under masks that the client makes."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import trio
from jsonschema import Draft202012Validator as Checker
from msgspec.structs import replace

from peer.ipc.grammar_messages import Grammar
from peer.ipc.sampling_options import Sampling
from peer.worker.grammar.client import GrammarRefused
from swarm.inference.client import ModelClient
from swarm.inference.session import RemoteSession
from tests.swarm.serving.masks.schemas import SCHEMAS
from tests.swarm.serving.serving_swarm import ServingSwarm, open_serving, reference_tokens, serving
from tests.swarm.serving.test_serving import PROMPT, all_pages_free, ask

pytestmark = pytest.mark.process

END = 257
TOKENS = 300
"""Of an answer, at most."""
LIVELY = Sampling(1.0, logit_bias=((ord('"'), 3.0), (ord("}"), 2.0), (ord("]"), 2.0)))
"""With short strings."""


SWARMS = {"one server": {"whole": "0:6"}, "two servers": {"s0": "0:3", "s1": "3:6"}}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, ServingSwarm]]:
    with ExitStack() as stack:
        yield {
            name: stack.enter_context(serving(tmp_path_factory.mktemp("masked"), **servers))
            for name, servers in SWARMS.items()
        }


@pytest.fixture
def swarms(served: dict[str, ServingSwarm]) -> Iterator[dict[str, ServingSwarm]]:
    """Servers for tests that strike none of them."""
    yield served
    for swarm in served.values():
        for server in swarm.servers.values():
            server.poll()
            assert server.alive and not server.all("worker_died"), server.transcript()


class Answer:
    """One answer under a schema."""

    def __init__(self, model: ModelClient, schema: Any, seed: int = 0) -> None:
        sampling = replace(LIVELY, seed=seed)
        self.session: RemoteSession = model.session(sampling, [END], grammar=Grammar(json.dumps(schema)))
        self.tokens = list[int]()

    async def run(self, at: dict[int, Callable[[], Any]] | None = None) -> None:
        """Generate; `at` says what to do once so many tokens have come."""
        with trio.fail_after(300):
            async for drawn in self.session.generate(PROMPT, TOKENS):
                self.tokens.append(drawn.token)
                if at and len(self.tokens) in at:
                    at[len(self.tokens)]()
        self.session.close()

    @property
    def is_whole(self) -> bool:
        return self.session.drawing.is_complete or self.tokens[-1:] == [END]

    @property
    def value(self) -> Any:
        return json.loads(bytes(token for token in self.tokens if token != END).decode())


async def all_answers(answers: list[Answer]) -> None:
    """Generate at once."""
    async with trio.open_nursery() as nursery:
        for answer in answers:
            nursery.start_soon(answer.run)


@pytest.mark.parametrize("name", [pytest.param("one server", marks=pytest.mark.soak), "two servers"])
async def test_answers_satisfy_their_schemas(swarms: dict[str, ServingSwarm], name: str) -> None:
    """All at once, in the same steps as answers without masks, which are what they are alone."""
    async with swarms[name].client() as model:
        answers = {kind: Answer(model, schema, 1) for kind, schema in SCHEMAS.items()}
        plain = list[list[int]]()

        async def free() -> None:
            plain.append(await ask(model, PROMPT, 60))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(free)
            nursery.start_soon(free)
            nursery.start_soon(all_answers, list(answers.values()))
        assert plain == [reference_tokens(PROMPT, 60)] * 2
        for kind, answer in answers.items():
            if answer.is_whole:
                Checker(SCHEMAS[kind], format_checker=Checker.FORMAT_CHECKER).validate(answer.value)
        cut = [kind for kind, answer in answers.items() if not answer.is_whole]
        assert len(cut) <= 2, cut
        await all_pages_free(swarms[name], model)


async def test_a_seed_draws_the_same_answer_from_one_server_and_from_two(swarms: dict[str, ServingSwarm]) -> None:
    said = list[list[int]]()
    for swarm in swarms.values():
        async with swarm.client() as model:
            for seed in range(2):
                answer = Answer(model, SCHEMAS["nested"], seed)
                await answer.run()
                said.append(answer.tokens)
    assert said[:2] == said[2:] and said[0] != said[1]


LETTERS = {"type": "string", "pattern": "^[a-z]{60}$"}


@pytest.mark.parametrize("place", [pytest.param(0, marks=pytest.mark.soak), 1])
async def test_a_server_that_is_killed_costs_no_token(tmp_path: Path, place: int) -> None:
    async with open_serving(tmp_path, s0="0:3", s1="3:6", s2="0:3", s3="3:6") as swarm, swarm.client() as model:
        calm = Answer(model, LETTERS, 7)
        await calm.run()
        struck = Answer(model, LETTERS, 7)

        def kill() -> None:
            swarm.servers[swarm.name_of(model, struck.session.route[place].peer)].kill()

        await struck.run({30: kill})
        assert struck.tokens == calm.tokens and len(calm.tokens) == 62
        assert struck.session.drawing.is_complete and struck.session.failovers >= 1


async def test_the_processes_of_grammars_may_die(swarms: dict[str, ServingSwarm]) -> None:
    async with swarms["two servers"].client() as model:
        calm, struck = Answer(model, LETTERS, 3), Answer(model, LETTERS, 3)
        await calm.run()

        def kill() -> None:
            assert model.grammars.forks.pid is not None
            os.killpg(model.grammars.forks.pid, signal.SIGKILL)  # with those of the answers

        await struck.run({20: kill, 40: kill})
        assert struck.tokens == calm.tokens and struck.session.failovers == 0


async def test_a_schema_that_is_refused_asks_no_server(swarms: dict[str, ServingSwarm]) -> None:
    async with swarms["two servers"].client() as model:
        answer = Answer(model, {"not": {}})
        with pytest.raises(GrammarRefused, match="has not, which"):
            await answer.run()
        assert answer.session.route == ()
