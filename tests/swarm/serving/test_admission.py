"""Who has a place at a block server, and who is blamed: keys cost nothing, and clients choose what servers send.

The worker and the flows are scripted; `test_hostile` has real ones, and `tests/soak/serving` the rates.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio

from peer.errors import ProtocolViolation
from peer.ipc.block_messages import SpanOutput, WireType
from peer.ipc.sampling_options import Sampling
from swarm.inference.messages import (
    Cause,
    NeighbourLost,
    PassTokens,
    Replay,
    SessionRefused,
    SessionStarted,
    StartSession,
)
from swarm.serving.output_log import RESENT_MAX
from swarm.serving.server import BlockServer
from swarm.serving.session_table import SESSIONS_MAX, SESSIONS_PER_CLIENT_MAX
from tests.swarm.serving.test_lost_tokens import ScriptedFlow, ScriptedWorker, known, settled

KEYS = SESSIONS_MAX // SESSIONS_PER_CLIENT_MAX
WIDTH = 4  # of one fp32 value


class Scene:
    """A server of blocks [3, 6) of 9, and the flows that it has."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.flows: dict[str, ScriptedFlow] = {}
        worker: Any = ScriptedWorker(of=9)
        host: Any = type("Host", (), {"peer_id": "me", "flows": self, "events": None})()
        self.server = BlockServer(worker, host, nursery, known)
        self.worker = worker
        self._count = 0

    async def open(self, peer: str) -> ScriptedFlow:
        return self.flows[peer]

    async def end_if_dead(self, flow: Any, silent_s: float, answer_s: float) -> None:
        await trio.lowlevel.checkpoint()  # none is

    def flow(self, peer: str, prefix: str = "", is_member: bool = True) -> Any:
        return self.flows.setdefault(peer, ScriptedFlow(peer, prefix, is_member))

    async def says(self, flow: Any, message: Any, payload: bytes = b"") -> None:
        await self.server.on_message(flow, message, memoryview(payload))
        await settled()

    async def start(
        self,
        flow: Any,
        source: str = "",
        target: str = "",
        wire: WireType | None = None,
    ) -> bytes:
        self._count += 1
        id = self._count.to_bytes(16, "big")
        await self.says(flow, StartSession(id, 1, 3, 6, source, target, Sampling(), wire=wire))
        return id


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    async with trio.open_nursery() as nursery:
        made = Scene(nursery)
        nursery.start_soon(made.server.run)
        yield made
        nursery.cancel_scope.cancel()


async def full(scene: Scene) -> list[ScriptedFlow]:
    """Let a few keys of one prefix take all places."""
    clients = [scene.flow(f"key {number}", "theirs", is_member=False) for number in range(KEYS)]
    for client in clients:
        for _ in range(SESSIONS_PER_CLIENT_MAX):
            await scene.start(client)
    assert scene.server.sessions == SESSIONS_MAX
    return clients


def refusals(flows: list[ScriptedFlow]) -> list[Cause]:
    return [refusal.cause for flow in flows for refusal in flow.of(SessionRefused)]


async def test_few_keys_of_one_prefix_keep_no_client_of_another_out(scene: Scene) -> None:
    theirs = await full(scene)
    late = scene.flow("late key", "theirs", is_member=False)
    await scene.start(late)
    assert refusals([late]) == ["full"], "none of its prefix is at rest"
    mine = scene.flow("me", "mine", is_member=False)
    for _ in range(SESSIONS_PER_CLIENT_MAX):
        await scene.start(mine)
    assert len(mine.of(SessionStarted)) == SESSIONS_PER_CLIENT_MAX and not mine.of(SessionRefused)
    assert refusals(theirs) == ["full"] * SESSIONS_PER_CLIENT_MAX and scene.server.sessions == SESSIONS_MAX
    await scene.start(mine)
    assert refusals([mine]) == ["full"], "one client has no more, whoever has the rest"


async def test_the_log_of_what_was_sent_is_shared_by_prefix(scene: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.serving.session_table.LOGS_BYTES_MAX", 64 * WIDTH)
    after = scene.flow("after")
    one = await scene.start(scene.flow("one", "mine", is_member=False), target="after")
    for number in range(8):
        await scene.start(scene.flow(f"key {number}", "theirs", is_member=False))
    for position in range(40):
        output(scene, 1, position, 1)
        await settled()
    after.sent.clear()
    await scene.says(scene.flow("one"), Replay(one, 1, 8, 40))  # the last 32, of 64 for all
    assert [message.position for message in after.of(PassTokens)] == [8, 24]


def output(scene: Scene, number: int, position: int, count: int) -> None:
    """Let the worker give hidden states."""
    message = SpanOutput(number, position, count, None, 0.0, (), (7,) * count)
    scene.worker.gives(message, b"\0" * WIDTH * count)


@pytest.mark.parametrize(
    ("ids", "payload", "wire"),
    [
        ((1, 2), b"\0" * WIDTH, None),
        ((1,), b"\0" * WIDTH, "int8"),
        ((1,), b"", None),
        ((), b"", None),
    ],
    ids=["too short", "another wire type", "a drawn token", "no tokens"],
)
async def test_what_a_client_has_a_server_send_ends_its_session_alone(
    scene: Scene, ids: tuple[int, ...], payload: bytes, wire: WireType | None
) -> None:
    client, before = scene.flow("client", is_member=False), scene.flow("before")
    id, other = await scene.start(client, "before", wire=wire), await scene.start(client, "before")
    await scene.says(before, PassTokens(id, 0, ids, False), payload)
    assert refusals([client]) == ["shape"] and not scene.server.has(id) and scene.server.has(other)
    await scene.says(before, PassTokens(id, 1, ids, False), payload)
    assert len(client.of(SessionRefused)) == 1, "it is over"
    with pytest.raises(ProtocolViolation):
        await scene.says(client, PassTokens(other, 0, (1,), False), b"")  # it says this itself


async def test_a_client_named_as_the_next_server_is_sent_nothing(scene: Scene) -> None:
    """It would take the tokens for a violation of ours."""
    client, victim = scene.flow("client", is_member=False), scene.flow("victim", is_member=False)
    await scene.start(client, target="victim")
    assert client.of(NeighbourLost) and not client.of(SessionStarted) and not victim.sent


async def test_a_revision_with_other_blocks_begins_the_session_again(scene: Scene) -> None:
    client = scene.flow("client", is_member=False)
    id = await scene.start(client)
    output(scene, 1, 0, 2)
    await scene.says(client, StartSession(id, 2, 4, 6, "", "", Sampling()))
    assert [started.revision for started in client.of(SessionStarted)] == [1, 2] and scene.server.sessions == 1


async def test_outputs_are_sent_again_only_so_often(scene: Scene) -> None:
    client, after = scene.flow("client", is_member=False), scene.flow("after")
    id = await scene.start(client, target="after")
    output(scene, 1, 0, 10)
    await settled()
    for _ in range(3 * RESENT_MAX):
        await scene.says(client, Replay(id, 1, 0, 0))
    assert len(after.of(PassTokens)) == RESENT_MAX and refusals([client]) == ["gap"] * 2 * RESENT_MAX
    output(scene, 1, 10, 10)  # what is computed may be sent again, too
    await settled()
    after.sent.clear()
    await scene.says(client, Replay(id, 1, 0, 20))
    assert sum(len(message.ids) for message in after.of(PassTokens)) == 20
