"""Models served by real processes: what they say, and that nobody notices a dead server but the clock."""

from __future__ import annotations

import re
import signal
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import pytest
import trio

from peer.errors import BarnraiseError, ConfigError, ConnectionLost
from peer.events import EventLog
from peer.identity import Identity
from peer.ipc.block_messages import WireType
from peer.ipc.sampling_options import Sampling
from peer.net.flow.flow import Flow
from peer.net.host import open_host
from peer.net.reach import LOCAL
from swarm.inference.client import ModelClient
from swarm.inference.client_view import NoServers, Patience
from swarm.inference.messages import ServingMessage, StartSession
from swarm.inference.session import RemoteSession
from tests.support.forking.forked import ForkedProcess
from tests.support.peer_process import PeerProcess
from tests.swarm.serving.serving_swarm import CONTEXT, ServingSwarm, open_serving, reference_tokens, serving

pytestmark = pytest.mark.process

PROMPT = list(b"Once upon a time there was a swarm")
GREEDY = Sampling()
WARM = Sampling(
    *(0.8, 50),
    seed=11,
    frequency_penalty=0.4,
    presence_penalty=0.3,
    logit_bias=((7, 3.0), (11, -50.0)),
)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServingSwarm]:
    with serving(tmp_path_factory.mktemp("served"), s0="0:3", s1="3:6") as swarm:
        yield swarm


@pytest.fixture
def swarm(servers: ServingSwarm) -> Iterator[ServingSwarm]:
    """Two servers, for tests that strike neither."""
    yield servers
    for server in servers.servers.values():
        server.poll()
        assert server.alive and not server.all("worker_died"), server.transcript()


async def say(
    session: RemoteSession, prompt: list[int], tokens: int, at: dict[int, Callable[[], Any]] | None = None
) -> list[int]:
    """Generate; `at` says what to do once so many tokens have come."""
    said = list[int]()
    with trio.fail_after(300):
        async for drawn in session.generate(prompt, tokens):
            said.append(drawn.token)
            if at and len(said) in at:
                at[len(said)]()
    return said


async def ask(model: ModelClient, prompt: list[int], tokens: int, sampling: Sampling = GREEDY) -> list[int]:
    """Generate in a session of its own."""
    session = model.session(sampling)
    try:
        return await say(session, prompt, tokens)
    finally:
        session.close()


async def test_two_servers_say_what_transformers_says(swarm: ServingSwarm) -> None:
    """Alone and eight at once, after short and long prompts, and over several turns."""
    prompts = [[5], PROMPT, [(7 * i) % 300 for i in range(2000)], *([i, i + 1] for i in range(5))]
    async with swarm.client() as model:
        wanted = [reference_tokens(prompt, 24) for prompt in prompts]
        assert [await ask(model, prompt, 24) for prompt in prompts[:3]] == wanted[:3]
        said: dict[int, list[int]] = {}

        async def one(index: int) -> None:
            said[index] = await ask(model, prompts[index], 24)

        async with trio.open_nursery() as nursery:
            for index in range(len(prompts)):
                nursery.start_soon(one, index)
        assert [said[index] for index in range(len(prompts))] == wanted

        session = model.session(GREEDY)
        first = await say(session, PROMPT, 20)
        second = await say(session, [1, 2, 3], 20)
        assert first == reference_tokens(PROMPT, 20)
        assert second == reference_tokens([*PROMPT, *first, 1, 2, 3], 20)
        turn = session.generate([4], 200)  # of which only one is wanted: the servers draw more meanwhile
        third = (await anext(turn)).token
        await turn.aclose()
        again = [*PROMPT, *first, 1, 2, 3, *second, 4, third, 9]
        assert await say(session, [9], 20) == reference_tokens(again, 20)
        session.close()

        with pytest.raises(ConfigError, match="context"):
            await ask(model, [1] * CONTEXT, 1)
        await all_pages_free(swarm, model)


@pytest.mark.parametrize("wire", ["bf16", "int8"])
async def test_a_session_chooses_the_type_on_the_wire(swarm: ServingSwarm, wire: WireType) -> None:
    """The tokens are those of a model whose hidden states are rounded at the border of the servers."""
    long = [(7 * i) % 300 for i in range(700)]
    async with swarm.client() as model:
        for prompt in (PROMPT, long):
            session = model.session(GREEDY, wire=wire)
            said = await say(session, prompt, 12)
            session.close()
            assert said == reference_tokens(prompt, 12, border=(3, wire))
        assert await ask(model, PROMPT, 12) == reference_tokens(PROMPT, 12)


async def test_with_rounded_hidden_states_a_server_is_replaced_as_well(tmp_path: Path) -> None:
    """What the first server has sent is sent again, byte by byte."""
    async with open_serving(tmp_path, s0="0:3", s1="3:6", s2="3:6") as swarm, swarm.client() as model:
        session = model.session(GREEDY, wire="int8")

        def kill() -> None:
            swarm.servers[swarm.name_of(model, session.route[1].peer)].kill()

        said = await say(session, PROMPT, 100, {50: kill})
        assert said[:50] == reference_tokens(PROMPT, 50, border=(3, "int8")) and len(said) == 100
        assert session.failovers == 1
        session.close()


async def all_pages_free(swarm: ServingSwarm, model: ModelClient) -> None:
    """Wait until no server has a session any more."""
    with trio.fail_after(300):
        while True:
            await model.servers.refresh(0.0)
            records = [r for r in model.servers.records.values() if swarm.servers[r.name].alive]
            if records and all(record.sessions == 0 and record.pages_free == record.pages for record in records):
                return
            await trio.sleep(0.2)


Strike = tuple[str, int]
OFTEN: list[Strike] = [("last", signal.SIGKILL), ("middle", signal.SIGSTOP)]
SELDOM: list[Strike] = [("first", signal.SIGKILL), ("both", signal.SIGKILL)]


@pytest.mark.parametrize(
    "struck", [pytest.param(OFTEN, id="often"), pytest.param(SELDOM, id="seldom", marks=pytest.mark.soak)]
)
async def test_a_dead_or_frozen_server_is_replaced(tmp_path: Path, struck: list[Strike]) -> None:
    """The answer goes on with the tokens of the undisturbed run, whichever server is struck, and how."""
    spans = {"a0": "0:2", "b0": "2:4", "c0": "4:6"}
    async with open_serving(tmp_path, **spans) as swarm, swarm.client() as model:
        undisturbed = await ask(model, PROMPT, 120, WARM)
        numbers = count(1)
        for where, how in struck:
            for name, blocks in spans.items():  # a spare for each
                if sum(server.alive for n, server in swarm.servers.items() if n[0] == name[0]) < 2:
                    await swarm.serve(f"{name[0]}{next(numbers)}", blocks)
            await swarm.known(model)
            session = model.session(WARM)
            hit = list[PeerProcess]()

            def strike(
                session: RemoteSession = session, hit: list[PeerProcess] = hit, where: str = where, how: int = how
            ) -> None:
                places = {"first": [0], "middle": [1], "last": [2], "both": [1, 2]}[where]
                for place in places:
                    server = swarm.servers[swarm.name_of(model, session.route[place].peer)]
                    hit.append(server)
                    server.process.send_signal(how)

            said = await say(session, PROMPT, 120, {20: strike})
            assert said == undisturbed, f"{where} struck by {how}"
            assert session.failovers >= 1
            session.close()
            for server in hit:
                server.kill()


async def test_without_a_spare_there_is_an_error_and_the_session_goes_on_when_one_comes(tmp_path: Path) -> None:
    async with open_serving(tmp_path, s0="0:3", s1="3:6") as swarm, swarm.client() as model:
        session = model.session(GREEDY)
        said = await say(session, PROMPT, 10)
        swarm.servers["s1"].kill()
        with pytest.raises(NoServers, match=r"blocks 3 to 5.*peer serve"):
            await say(session, [8], 10)  # after 2 s where nothing else runs (benchmarks/serving/failover.py)
        await swarm.serve("s2", "3:6")
        await swarm.known(model)
        rest = [token async for token in drawn(session, 10)]
        assert rest == reference_tokens([*PROMPT, *said, 8], 10)
        session.close()


async def test_a_patient_client_says_what_is_missing_and_its_answer_goes_on_when_a_server_comes(tmp_path: Path) -> None:
    async with open_serving(tmp_path, s0="0:3", s1="3:6") as swarm:
        missing, told = list[str](), trio.Event()

        def tell(text: str) -> None:
            missing.append(text)
            told.set()

        async with swarm.client(Patience(600.0, tell)) as model, trio.open_nursery() as nursery:
            session, said = model.session(GREEDY), list[int]()

            async def answer() -> None:
                said.extend(await say(session, PROMPT, 60, {10: swarm.servers["s1"].kill}))

            nursery.start_soon(answer)
            await told.wait()
            assert len(said) == 0
            await swarm.serve("s2", "3:6")
        assert said == reference_tokens(PROMPT, 60)
        assert len(missing) == 1 and re.search("blocks 3 to 5.*peer serve", missing[0])
        session.close()


async def drawn(session: RemoteSession, tokens: int) -> Any:
    """Go on where an error has ended a turn."""
    async for one in session.generate([], tokens):
        yield one.token


async def test_a_server_that_leaves_is_replaced_first(tmp_path: Path) -> None:
    async with open_serving(tmp_path, s0="0:6", s1="0:6") as swarm, swarm.client() as model:
        session = model.session(WARM)
        wanted = await ask(model, PROMPT, 200, WARM)

        def interrupt() -> None:
            swarm.servers[swarm.name_of(model, session.route[0].peer)].interrupt()

        assert await say(session, PROMPT, 200, {20: interrupt}) == wanted
        session.close()
        left = [server for server in swarm.servers.values() if not server.alive]
        for server in left:
            assert await server.wait_exit() == 130


async def test_killed_and_frozen_clients_cost_the_others_nothing(swarm: ServingSwarm) -> None:
    """Of four clients one is killed in the middle of its answer and one frozen: all pages are free then, and the other
    two get their tokens. A stranger hears nothing."""
    async with swarm.client() as model, swarm.client() as other:
        await all_pages_free(swarm, model)
        doomed = [
            ForkedProcess(
                *("cli.main", "generate", str(swarm.invite), "Once", "--max-tokens", "4000", "--seed", str(i)),
                stdout=DEVNULL,
                stderr=DEVNULL,
            )
            for i in range(2)
        ]
        with trio.fail_after(120):
            while any(record.sessions < len(doomed) for record in model.servers.records.values()):
                await trio.sleep(0.1)
                await model.servers.refresh(0.0)
        said: dict[int, list[int]] = {}

        async def one(client: ModelClient, number: int) -> None:
            session = client.session(GREEDY)
            strike: Callable[[], None] = partial(doomed[number].send_signal, (signal.SIGKILL, signal.SIGSTOP)[number])
            said[number] = await say(session, [*PROMPT, number], 100, {20: strike})
            session.close()

        async with trio.open_nursery() as nursery:
            for number, client in enumerate((model, other)):
                nursery.start_soon(one, client, number)
        assert said == {number: reference_tokens([*PROMPT, number], 100) for number in range(2)}
        await all_pages_free(swarm, model)
        for process in doomed:
            process.kill()
            process.wait()
    await a_stranger_hears_nothing(swarm)


async def a_stranger_hears_nothing(swarm: ServingSwarm) -> None:
    """The model is closed: a flow without an invite gets no answer, whatever it says."""
    config = open_host(identity=Identity.generate(), events=EventLog(), reach=LOCAL)
    async with config as stranger:
        silence = Silence()
        stranger.flows.serve(silence)
        server = await stranger.connect_address(swarm.invite.addresses[0], timeout_s=60)
        with pytest.raises(BarnraiseError), trio.fail_after(300):
            flow = await stranger.flows.open(server)
            flow.send(StartSession(b"s" * 16, 1, 0, 3, "", "", Sampling()))
            await flow.ended.wait()
            raise ConnectionLost(flow.reason)
        assert not silence.heard


class Silence:
    """Keeps what is said to it."""

    types = ServingMessage
    payload_max = 1 << 20

    def __init__(self) -> None:
        self.heard: list[Any] = []

    async def on_message(self, flow: Flow, message: Any, payload: memoryview) -> None:
        self.heard.append(message)

    def on_end(self, flow: Flow, reason: str) -> None:
        """Nothing to do."""
