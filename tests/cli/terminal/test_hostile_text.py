"""What strangers and members write is shown by commands and views in a real terminal, and never obeyed by it."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

import msgspec
import pytest
import trio
from msgspec import structs

import swarm.run
from peer.catalogue.reading import CATALOGUE
from peer.errors import NotAdmitted
from peer.events import EventLog
from peer.identity import Identity
from peer.net.hello import HELLO
from peer.net.host import open_host
from peer.net.method import Method
from peer.net.reach import Reach
from peer.net.rpc import Call
from swarm.membership.vote_shares import InviteStatus, VoteShare
from swarm.run.invite import Invite
from swarm.run.manifest import sign_manifest
from swarm.run.manifest_transfer import MANIFEST, serve_run_files
from swarm.run.sections import RunRules
from swarm.status.judged import JudgedStatus
from swarm.status.state import (
    MemberClaims,
    MemberFacts,
    MemberSeen,
    MemberState,
    MonitorState,
    StageClaims,
    StageFacts,
    StageSeen,
    StageState,
    Verdict,
)
from tests.cli.support.hostile import EVIL, MARK, MESSAGE_BYTES_MAX, SENT, harmless, shown_by
from tests.swarm.run.test_manifest import make_manifest
from tests.swarm.status.scenes import WATCH

Place = Literal["terminal", "pipe"]
SENT_BYTES = 15_000  # nearly what a header may hold
HUGE = (SENT + "x" * SENT_BYTES)[: SENT_BYTES - len(SENT)] + SENT
LISTEN = ("--listen", "/ip4/127.0.0.1/tcp/0")


def open_methods() -> Iterator[Method[Any, Any]]:
    """Yield the methods of first contact, which a stranger answers."""
    for found in pkgutil.iter_modules(swarm.run.__path__):
        for value in vars(importlib.import_module(f"swarm.run.{found.name}")).values():
            if isinstance(value, Method) and value.access == "open":
                yield value


@asynccontextmanager
async def stranger(message: str, honest: bool) -> AsyncIterator[str]:
    """Open a peer that refuses every call with `message`; if `honest`, all calls but that for its manifest. Yields an
    invite to it."""
    authority = Identity.generate()
    manifest = make_manifest(authority.peer_id, run=RunRules(name="a run", open=True))

    async def refuse(call: Call[Any]) -> Any:
        raise NotAdmitted(message)

    async with open_host(identity=authority, events=EventLog(), reach=Reach(LISTEN[1:])) as host:
        if honest:
            serve_run_files(host.rpc, sign_manifest(authority, manifest), b"")
        host.rpc.server._methods.pop(HELLO.name)
        for method in {method.name: method for method in (*open_methods(), HELLO)}.values():
            if not honest or method.name != MANIFEST.name:
                host.rpc.register(method, refuse)
        yield str(Invite(manifest.run_id, authority.peer_id, host.addresses))


@pytest.mark.process
@pytest.mark.parametrize(
    ("place", "all_ways"),
    [("terminal", False), ("pipe", False), *(pytest.param(p, True, marks=pytest.mark.soak) for p in get_args(Place))],
)
async def test_a_strangers_refusal_is_one_short_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: Place, all_ways: bool
) -> None:
    """A stranger whose invite was pasted refuses with orders to the terminal, once in as many as a call can carry.

    JSON is for a pipe, and views are for a terminal; `all_ways`: both at both."""
    assert len(HUGE.encode()) > SENT_BYTES > 3 * MESSAGE_BYTES_MAX
    monkeypatch.setattr("peer.net.rpc_server.cut", lambda text, most: text)  # as only a stranger sends it
    async with stranger(HUGE, honest=False) as first, stranger(SENT, honest=True) as second:
        home, model = str(tmp_path / "home"), str(tmp_path / "model")
        commands = [
            ["status", first],
            ["status", second, "--json"],
            ["join", first, "--home", home, "--device", "cpu", *LISTEN],
            ["join", second, "--home", home, "--device", "cpu", *LISTEN, "--json"],
            ["doctor", first, "--home", home, *LISTEN],
            ["doctor", second, "--home", home, *LISTEN, "--json"],
            ["export", first, "--out", model],
        ]
        commands = [command for command in commands if all_ways or ("--json" in command) == (place == "pipe")]
        with trio.fail_after(300):
            shown = await shown_by([{"command": command} for command in commands], place)
    assert len(shown) == len(commands) >= 3
    for command, piece in zip(commands, shown, strict=True):
        joins = command[0] == "join"  # its view tells of the contact as well, and breaks long lines
        text = harmless(piece, wraps=joins)
        told = [line for line in text.splitlines() if MARK in line]
        assert 1 <= len(told) <= (4 if joins else 1) and len(piece) <= MESSAGE_BYTES_MAX * (1 + joins), (
            command[0],
            len(piece),
            text[:500],
        )
        assert len(told[0].encode()) <= MESSAGE_BYTES_MAX and "Traceback" not in text
    names = [path.name for path in tmp_path.rglob("*")]
    assert all(name.isascii() and name.isprintable() for name in names), "remote text in a file's name"


def member(text: str, stage: int) -> MemberState:
    claims = MemberClaims(
        name=text, role="feeder" if stage < 0 else text, version=text, phase=text, age_s=1.0, bytes_up=1, bytes_down=1,
        val_loss=float("nan"), steps=3, skipped=3, stage=max(stage, 0), source=0, ready_in_s=stage + 2.0, client=True,
        state_hash=text, first=0, end=1, commits=(1,),
    )  # fmt: skip
    facts = MemberFacts(membership="none", merged=0, missed=0)
    return MemberState(
        peer=text, facts=facts, seen=MemberSeen(answers=True, events="told", link="direct", relay=text), claims=claims
    )


def run_status(text: str, stages: int) -> dict[str, Any]:
    """Return a run in which every text is this one."""
    facts = StageFacts(round=1, term=1, tokens=0, state_hash=text, members=1, quorum=1, absent=0, learners=0)
    stage = StageState(
        stage=0, first=0, end=1, facts=facts, seen=StageSeen(answering=1, margin=0, commit_age_s=None, round_s=None),
        claims=StageClaims(replicas=1, arriving=0, rate=0.0, queue=None, phase=text),
    )  # fmt: skip
    seen = MonitorState(
        kind="run", at=1.0, run_id=text, name=text, open=True, rounds_planned=5, round=1, tokens=1,
        verdict=Verdict(level="bad", word=text, reason=text, remedy=text, basis=("claims",)), silent=(text,),
        members=(member(text, 0), member(text, -1)), servers=(member(text, 0),), stages=(stage,) * stages,
        shares=(VoteShare(invite=text, votes=2, members=3, is_only=True), VoteShare(prefix=text, votes=2, members=3)),
        guests=(InviteStatus(invite=text, guests=8, peers=(text,), members=1),), cautions=(text,), troubles=(text,),
        judged=(JudgedStatus(peer=text, judges=[text], left_out_by=[text]),), judges=1, names={text: text},
        monitor=WATCH,
    )  # fmt: skip
    built = msgspec.to_builtins(seen)
    assert isinstance(built, dict)
    return built


SPECIAL: dict[str, dict[str, Any]] = {
    "round_committed": {"counted": []},
    "head_adopted": {"counted": []},
    "quorum_lost": {"alone": True},
    "worker_ready": {"recompute": "selective"},
}


def fields_of(name: str, text: str = EVIL) -> dict[str, Any]:
    """Return fields of an event of the catalogue; every text in them is this one."""
    samples: dict[Any, Any] = {str: text, int: 2, float: 2.0, bool: False, tuple[str, ...]: [text, text]}
    types = get_type_hints(CATALOGUE[name])
    found = {}
    for field in structs.fields(CATALOGUE[name]):
        kind = types[field.name]
        choices = [choice for choice in get_args(kind) if choice in samples]  # of `int | None`
        found[field.name] = samples[kind] if kind in samples else samples[choices[0]]
    return {**found, **SPECIAL.get(name, {})}


def hostile_stream(path: Path) -> int:
    """Write each event that a view knows, twice, as a peer with no sink for its log would; return their number."""
    names = [name for name in CATALOGUE for _ in range(2)]
    with path.open("w") as file:
        for at, name in enumerate(names):
            fields = {**fields_of(name), "at": float(at), "event": name}
            file.write(msgspec.json.encode(_encodable(fields)).decode() + "\n")
    return len(names)


def _encodable(fields: dict[str, Any]) -> dict[str, Any]:
    def clean(value: Any) -> Any:
        if isinstance(value, list):
            return [clean(inner) for inner in value]
        return value.replace("\ud800", "") if isinstance(value, str) else value

    return {key: clean(value) for key, value in fields.items()}


@pytest.mark.process
@pytest.mark.parametrize("place", ["terminal", "pipe"])
async def test_views_show_every_field_as_text(tmp_path: Path, place: Place) -> None:
    """The events of `join` and `coordinate`, a reading of `status`, a finding of `doctor`, an error of any command."""
    events = tmp_path / "events.jsonl"
    count = hostile_stream(events)
    sentence = EVIL + "y" * 100_000 + EVIL
    actions: list[dict[str, Any]] = [
        {"events": str(events)},
        {"events": str(events), "json": True},
        {"status": run_status(EVIL, 0)},
        {"status": run_status(EVIL, 2)},
        *({"finding": ["admission", state, sentence, sentence]} for state in ("ok", "warning", "failure")),
        {"error": sentence},
    ]
    with trio.fail_after(300):
        shown = await shown_by(actions, place)
    assert len(shown) == len(actions)
    tables = (0, 2, 3)
    texts = [harmless(piece, wraps=index in tables) for index, piece in enumerate(shown)]
    assert all(MARK in text for text in texts) and "Traceback" not in "".join(texts)
    for piece in shown[4:]:
        assert len(piece) <= MESSAGE_BYTES_MAX
    assert "[red]:skull:[/red]" in texts[6], "markup is text"
    lines = [line for line in texts[1].splitlines() if line.startswith("{")]
    assert len(lines) == count and all(line.isascii() for line in lines)
    for line in lines:
        assert msgspec.json.decode(line)["event"] in CATALOGUE
