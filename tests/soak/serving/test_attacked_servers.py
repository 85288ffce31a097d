"""Honest clients beside one person with many keys, and beside one whose servers blame each other for what it sends."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack
from contextvars import ContextVar
from functools import partial
from pathlib import Path
from typing import Any, Final

import pytest
import trio

from peer.errors import BarnraiseError
from peer.ipc.block_messages import WireType
from peer.ipc.sampling_options import Sampling
from swarm.inference.client import ModelClient, open_model
from swarm.inference.messages import EndSession, PassTokens, Replay, Rewind, StartSession
from swarm.serving.session_table import SESSIONS_MAX, SESSIONS_PER_CLIENT_MAX
from tests.swarm.serving.serving_swarm import ServingSwarm, open_serving, reference_tokens
from tests.swarm.serving.test_serving import PROMPT, ask

pytestmark = [pytest.mark.soak, pytest.mark.process]
ATTACKS_S: Final = 25.0
WIRES: Final[tuple[WireType | None, ...]] = ("int8", "bf16", None)
TOKENS: Final = 200
ANSWERS: Final = 6
KEYS: Final = 128
QUESTIONS: Final = 40
THEIR_ADDRESS: Final = "127.0.1.1"
"""Of another prefix than that of the others, 127.0.0.0/24."""


async def test_a_client_that_has_servers_send_nonsense_slows_no_honest_one(tmp_path: Path) -> None:
    async with open_serving(tmp_path, s0="0:3", s1="3:6") as swarm, swarm.client() as model, swarm.client() as bad:
        said = reference_tokens(PROMPT, TOKENS)
        assert await ask(model, PROMPT, TOKENS) == said
        rates: dict[bool, list[float]] = {False: [], True: []}
        attacks = 0
        for number in range(ANSWERS):  # in turns, as the machine is now quick and now slow
            attacked = bool(number % 2)
            async with trio.open_nursery() as nursery:
                if attacked:
                    nursery.start_soon(attack, swarm, bad)
                began = time.perf_counter()
                assert await ask(model, PROMPT, TOKENS) == said
                took_s = time.perf_counter() - began
                attacks += int(took_s * ATTACKS_S) if attacked else 0
                rates[attacked].append(TOKENS / took_s)
                nursery.cancel_scope.cancel()
        quiet, beside = max(rates[False]), max(rates[True])
        print(f"  {quiet:.0f} tokens/s, {beside:.0f} beside {attacks} attacks", flush=True)
        assert beside > 0.9 * quiet
        assert not [fact.fields for server in swarm.servers.values() for fact in server.all("peer_penalized")]


async def attack(swarm: ServingSwarm, model: ModelClient) -> None:
    """Begin sessions at two servers that do not fit each other, until cancelled."""
    peers = {record.name: peer for peer, record in model.servers.records.items()}
    first, last = [await model.server_flows.open(peers[name]) for name in ("s0", "s1")]
    due, number, begun = trio.current_time(), 0, list[bytes]()
    while True:
        due, number = due + 1 / ATTACKS_S, number + 1
        await trio.sleep_until(due)
        id, wire = secrets.token_bytes(16), WIRES[number % len(WIRES)]
        common: dict[str, Any] = {"sampling": Sampling(), "allowed": 50}
        first.send(StartSession(id, 1, 0, 3, peers["s1"], peers["s1"], wire=wire, **common))
        last.send(StartSession(id, 1, 3, 6, peers["s0"], peers["s0"], wire="fp32" if wire else "int8", **common))
        first.send(Replay(id, 1, 0, 0))
        last.send(Replay(id, 1, 0, 0))
        first.send(PassTokens(id, 0, (1, 2, 3), True))
        first.send(PassTokens(id, number % 7, (4,), True))
        first.send(Rewind(id, number % 3))
        last.send(Rewind(id, number % 5))
        first.send(PassTokens(id, 1, (5, 6), True))
        begun.append(id)
        if len(begun) > ATTACKS_S:
            ended = begun.pop(0)
            first.send(EndSession(ended))
            last.send(EndSession(ended))


source: ContextVar[str | None] = ContextVar("source", default=None)
"""The address from which this task connects."""


@pytest.fixture
def sources(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    dial = trio.open_tcp_stream
    monkeypatch.setattr(trio, "open_tcp_stream", lambda *to, **how: dial(*to, **{**how, "local_address": source.get()}))
    yield


@pytest.mark.usefixtures("sources")
async def test_many_keys_of_one_prefix_keep_no_client_of_another_waiting(tmp_path: Path) -> None:
    async with open_serving(tmp_path, s0="0:3", s1="3:6") as swarm, AsyncExitStack() as stack:
        honest = await stack.enter_async_context(swarm.client())
        await ask(honest, PROMPT, 1)
        nursery = await stack.enter_async_context(trio.open_nursery())
        ready = [trio.Event() for _ in range(KEYS)]
        for number in range(KEYS):
            nursery.start_soon(hold_sessions, swarm, ready[number], partial(trio.sleep, number / 5))
        with trio.fail_after(400):
            for event in ready:
                await event.wait()
        with trio.fail_after(60):
            while True:
                await honest.servers.refresh(0.0)
                held = [record.sessions for record in honest.servers.records.values()]
                if max(held) >= SESSIONS_MAX - 8:
                    break
                print(f"  {held}", flush=True)
                await trio.sleep(1)
        waits = list[float]()
        for number in range(QUESTIONS):
            async with swarm.client() as late:  # a key that has nothing here yet
                began = time.perf_counter()
                said = await ask(late, [*PROMPT, number], 1)
                waits.append(time.perf_counter() - began)
                assert said == reference_tokens([*PROMPT, number], 1)
        p95_s = sorted(waits)[int(0.95 * len(waits))]
        print(f"  {held} sessions of {KEYS} keys; another prefix is answered in {p95_s:.2f} s (p95)", flush=True)
        assert p95_s < 1.0
        nursery.cancel_scope.cancel()


async def hold_sessions(swarm: ServingSwarm, ready: trio.Event, turn: Any) -> None:
    """Be a key of the one person: hold its part of all sessions of both servers, for as long as it gets them."""
    await turn()
    source.set(THEIR_ADDRESS)
    try:
        await stay_with_sessions(swarm, ready)
    except BarnraiseError:
        ready.set()  # not even a connection: its prefix has its share of them


async def stay_with_sessions(swarm: ServingSwarm, ready: trio.Event) -> None:
    async with open_model(swarm.invite) as model:
        for record_peer, record in list((await known(model)).items()):
            flow = await model.server_flows.open(record_peer)
            first, end = (0, 3) if record.name == "s0" else (3, 6)
            for _ in range(SESSIONS_PER_CLIENT_MAX):
                flow.send(StartSession(secrets.token_bytes(16), 1, first, end, "", "", Sampling()))
        ready.set()
        await trio.sleep_forever()


async def known(model: ModelClient) -> Any:
    while len(model.servers.records) < 2:
        await model.servers.refresh(0.0)
        await trio.sleep(0.1)
    return model.servers.records
