"""Whom members judge by the loss, as a client reads it from them and shows it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest

from dht.node import Node
from optim.config import DilocoConfig
from peer.events import EventLog
from peer.identity import Identity, Signed
from peer.net.host import Host, open_host
from peer.net.method import Call, Empty, Method
from swarm.client.session import RunClient
from swarm.membership.member_record import MemberRecord
from swarm.membership.proven_heads import ProvenHead
from swarm.protocol.messages import JUDGED, JUDGED_MAX, JudgedPeers
from swarm.run.manifest import Manifest
from swarm.status.judged import JudgedStatus, ask_judged, judged_by
from swarm.status.reading import RunReading, read_run
from tests.swarm.placement.test_stages import manifest_of
from tests.swarm.run.test_gate import SOON
from tests.swarm.status.test_reading import candidate, peer, shown, state_of

NAMES = ("ann", "bob", "cyd", "dan")
GOLDEN = Path(__file__).parent / "golden" / "status-judged-80.txt"


def checking(share: float = 0.5) -> Manifest:
    return msgspec.structs.replace(manifest_of(1), outer=DilocoConfig(steps=4, check_by_loss=share))


def test_each_member_has_one_word_and_names_none_that_is_not_there() -> None:
    said = {
        "a": JudgedPeers(("c", "gone", "a"), ("d",)),
        "b": JudgedPeers(("d", "d", "c"), ("d",)),
        "c": JudgedPeers(),
        "d": JudgedPeers(("c",)),
    }
    assert judged_by(said, {"a", "b", "c", "d"}) == [
        JudgedStatus(peer="c", judges=["a", "b", "d"], left_out_by=[]),
        JudgedStatus(peer="d", judges=["a", "b"], left_out_by=["a", "b"]),
    ]
    assert judged_by(said, ()) == judged_by({}, {"a"}) == []


@pytest.mark.parametrize("field", ["suspects", "left_out"])
def test_what_a_member_may_name_has_bounds(field: str) -> None:
    for names in (["x"] * (JUDGED_MAX + 1), ["x" * 65], [7], "x"):
        with pytest.raises(msgspec.ValidationError, match=field):
            msgspec.msgpack.decode(msgspec.msgpack.encode({field: names}), type=JudgedPeers)


class Garbage(msgspec.Struct):
    suspects: int


@dataclass(frozen=True, kw_only=True)
class Looking(RunClient):
    """A client that has read the records and the heads of a run."""

    records: Mapping[str, MemberRecord]
    best: ProvenHead

    async def members(self) -> dict[str, MemberRecord]:
        return dict(self.records)

    async def all_candidates(
        self, records: Mapping[str, MemberRecord], silent: set[str] | None = None
    ) -> list[list[ProvenHead]]:
        return [[self.best]]


class Scene:
    """A client and four members of which each answers in its way."""

    def __init__(self, client: Host, members: list[Host]) -> None:
        self.client, self.members = client, members
        self.asked: list[str] = []
        self.ids = [host.peer_id for host in members]

    def answer(self, host: Host, word: Any, method: Method[Any, Any] = JUDGED) -> None:
        async def on_ask(call: Call[Any]) -> Any:
            self.asked.append(host.peer_id)
            return word

        host.rpc.register(method, on_ask)

    async def look(self, manifest: Manifest) -> RunReading:
        records = {host: peer(name=name) for host, name in zip(self.ids, NAMES, strict=True)}
        best = candidate(manifest, 0, 4, self.ids[:3])
        signed, node = cast(Signed, None), cast(Node, None)
        looking = Looking(self.client, node, signed, manifest, b"", records=records, best=best)
        return await read_run(looking)


async def scene_in(stack: AsyncExitStack) -> Scene:
    client, *members = [
        await stack.enter_async_context(open_host(identity=Identity.generate(), events=EventLog())) for _ in range(5)
    ]
    for host in members:
        await client.connect_address(host.addresses[0], timeout_s=SOON)
    return Scene(client, members)


async def test_a_client_asks_the_members_of_the_last_head() -> None:
    async with AsyncExitStack() as stack:
        scene = await scene_in(stack)
        ann, bob, cyd, dan = scene.ids
        for host in scene.members[:2]:
            scene.answer(host, JudgedPeers((cyd, "a stranger"), (dan, host.peer_id)))
        scene.answer(scene.members[3], JudgedPeers((ann,)))  # no member, so no judge
        seen = await scene.look(checking())
        assert [(one.peer, one.judges, one.left_out_by) for one in seen.judged] == [
            (dan, sorted((ann, bob)), sorted((ann, bob))),
            (cyd, sorted((ann, bob)), []),
        ]
        assert seen.judges == 2, "the third one does not know the question, as older software"
        assert sorted(scene.asked) == sorted((ann, bob))
        assert msgspec.to_builtins(seen.judged[0]) == {
            "peer": dan, "judges": sorted((ann, bob)), "left_out_by": sorted((ann, bob))
        }  # fmt: skip


async def test_garbage_is_no_word_and_a_run_without_the_check_is_not_asked() -> None:
    async with AsyncExitStack() as stack:
        scene = await scene_in(stack)
        scene.answer(scene.members[0], JudgedPeers(("x",) * (JUDGED_MAX + 1)))
        scene.answer(scene.members[1], Garbage(3), Method(JUDGED.name, Empty, Garbage, access="client"))
        said = await ask_judged(scene.client, scene.ids)
        assert len(scene.asked) == 2 and said == {}
        scene.asked.clear()
        seen = await scene.look(checking(0.0))
        assert (seen.judged, seen.judges, scene.asked) == ((), None, [])


def told(capsys: pytest.CaptureFixture[str], names: Sequence[str] = NAMES[:3], **changes: Any) -> str:
    manifest = checking()
    records = {f"id-of-{name}": peer(name=name, round=4, speed=1.5) for name in NAMES}
    best = candidate(manifest, 0, 4, [f"id-of-{name}" for name in names])
    return shown(state_of(manifest, records, [best], **changes), capsys)


def test_it_is_shown_with_how_many_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    judged = [
        JudgedStatus(peer="id-of-dan", judges=["id-of-ann", "id-of-bob"], left_out_by=["id-of-ann", "id-of-bob"]),
        JudgedStatus(peer="id-of-cyd", judges=["id-of-ann", "id-of-bob"], left_out_by=["id-of-bob"]),
        JudgedStatus(peer="id-of-eve", judges=["id-of-ann"], left_out_by=[]),
    ]
    text = told(capsys, judged=tuple(judged), judges=3)
    if os.environ.get("GOLDEN") == "write":
        GOLDEN.write_text(text)
    assert text == GOLDEN.read_text()
    assert max(map(len, text.splitlines())) <= 80


def test_that_none_answered_is_not_told_as_none_is_judged(capsys: pytest.CaptureFixture[str]) -> None:
    silence = "no member answered whose updates make the loss worse"
    assert silence in told(capsys, judges=0)
    assert silence not in told(capsys, judges=1) and silence not in told(capsys)
    assert silence not in told(capsys, judges=0, names=()), "a run that has not begun"
