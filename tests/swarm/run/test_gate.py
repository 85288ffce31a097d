"""The gate of a run between real hosts: introductions, bans, run files, dialling back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
from blake3 import blake3

from peer.errors import CheckpointError, ConfigError, DialError, NotAdmitted, ProtocolViolation, RemoteError
from peer.events import EventLog
from peer.identity import Identity, Signed
from peer.net.host import Host, HostConfig, open_host
from peer.net.rpc import Call, Method
from swarm.membership.reachability import DIAL_BACK, DialBackRequest, serve_dial_back
from swarm.run.bootstrap import fetch_run_files
from swarm.run.credentials import BanList, issue_token, sign_bans
from swarm.run.gate import Credentials, Gate, enter
from swarm.run.invite import Invite
from swarm.run.manifest import PROTOCOL_VERSION, Manifest, sign_manifest
from swarm.run.manifest_transfer import (
    check_tokenizer,
    fetch_manifest,
    fetch_tokenizer,
    load_run_files,
    save_run_files,
    serve_run_files,
)
from swarm.run.sections import RunRules
from tests.swarm.run.test_manifest import make_manifest

AUTHORITY = Identity.generate()
SOON = 60.0


class Word(msgspec.Struct, frozen=True):
    text: str


ECHO = Method("test.echo", Word, Word)


async def echo(call: Call[Word]) -> Word:
    return call.body


def manifest_of(*, open_run: bool, **changes: object) -> Manifest:
    return make_manifest(AUTHORITY.peer_id, run=RunRules(name="gated", open=open_run), **changes)


def token_for(manifest: Manifest) -> Signed:
    return issue_token(AUTHORITY, manifest.run_id, time.time(), 60.0)


@asynccontextmanager
async def hosts(count: int, *, first: Identity | None = None) -> AsyncIterator[list[Host]]:
    """`count` hosts on loopback that know each other's addresses; each serves ECHO."""
    if count == 0:
        yield []
        return
    config = HostConfig(identity=first or Identity.generate(), events=EventLog())
    async with open_host(config) as host, hosts(count - 1) as rest:
        host.rpc.register(ECHO, echo)
        for other in rest:
            host.book.add(other.peer_id, other.addresses)
            other.book.add(host.peer_id, host.addresses)
        yield [host, *rest]


async def hear(host: Host, other: Host) -> str:
    return (await host.rpc.call(other.peer_id, ECHO, Word("hi"), timeout_s=SOON)).body.text


async def test_an_open_run_needs_no_introduction() -> None:
    manifest = manifest_of(open_run=True)
    async with hosts(2) as (a, b):
        Gate(b.rpc, manifest, None)
        assert await hear(a, b) == "hi"


async def test_strangers_are_refused_and_members_introduce_themselves() -> None:
    manifest = manifest_of(open_run=False)
    async with hosts(3) as (a, b, stranger):
        for host in (a, b):
            Gate(host.rpc, manifest, token_for(manifest))
        with pytest.raises(RemoteError) as caught:
            await hear(stranger, b)
        assert caught.value.code == "NotAdmitted"
        assert await hear(a, b) == "hi"  # refused once, introduced, tried again: all inside the call
        assert await hear(b, a) == "hi"


async def test_a_peer_that_forgot_the_caller_is_introduced_again() -> None:
    manifest = manifest_of(open_run=False)
    async with hosts(2) as (a, b):
        Gate(a.rpc, manifest, token_for(manifest))
        gate = Gate(b.rpc, manifest, token_for(manifest))
        assert await hear(a, b) == "hi"
        gate.learn_bans(sign_bans(AUTHORITY, BanList(manifest.run_id, 1)))  # every token is shown again
        assert await hear(a, b) == "hi"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", "no token"),
        ("expired", "expired"),
        ("foreign", "stranger to this run"),
        ("made out to another", "made out to"),
        ("wrong run", "belongs to run"),
        ("other version", "protocol version"),
    ],
)
async def test_a_refused_peer_gets_the_reason(case: str, words: str) -> None:
    manifest = manifest_of(open_run=False)
    run_id, now = manifest.run_id, time.time()
    shown = {
        "missing": Credentials(run_id),
        "expired": Credentials(run_id, token=issue_token(AUTHORITY, run_id, now - 7200, 60.0)),
        "foreign": Credentials(run_id, token=issue_token(Identity.generate(), run_id, now, 60.0)),
        "made out to another": Credentials(
            run_id, token=issue_token(AUTHORITY, run_id, now, 60.0, peer=AUTHORITY.peer_id)
        ),
        "wrong run": Credentials("a" * 32, token=token_for(manifest)),
        "other version": Credentials(run_id, protocol=PROTOCOL_VERSION + 1, token=token_for(manifest)),
    }[case]
    async with hosts(2) as (a, b):
        Gate(b.rpc, manifest, token_for(manifest))
        with pytest.raises(RemoteError, match=words) as caught:
            await enter(a.rpc, b.peer_id, shown, SOON)
        assert caught.value.code == "NotAdmitted"


async def test_bans_take_effect_at_once_and_spread_with_introductions() -> None:
    manifest = manifest_of(open_run=True)
    async with hosts(3) as (a, b, banned):
        gates = {host: Gate(host.rpc, manifest, None) for host in (a, b)}
        assert await hear(banned, b) == "hi"
        gates[a].learn_bans(sign_bans(AUTHORITY, BanList(manifest.run_id, 2, peers=frozenset({banned.peer_id}))))
        await gates[a].introduce(b.peer_id, SOON)
        assert gates[b].bans == gates[a].bans
        with pytest.raises(RemoteError, match="banned"):
            await hear(banned, b)
        gates[b].learn_bans(sign_bans(AUTHORITY, BanList(manifest.run_id, 1)))  # an older list changes nothing
        with pytest.raises(RemoteError, match="banned"):
            await hear(banned, b)
        with pytest.raises(ProtocolViolation):
            gates[b].learn_bans(sign_bans(Identity.generate(), BanList(manifest.run_id, 9)))


async def test_the_run_files_travel_and_are_checked() -> None:
    tokenizer = b'{"a": "tokenizer"}'
    manifest = manifest_of(open_run=True, tokenizer=blake3(tokenizer).hexdigest())
    signed = sign_manifest(AUTHORITY, manifest)
    async with hosts(2) as (a, b):
        serve_run_files(b.rpc, signed, tokenizer)
        assert await fetch_manifest(a.rpc, b.peer_id, manifest.run_id, SOON) == signed
        assert await fetch_tokenizer(a.rpc, b.peer_id, manifest, SOON) == tokenizer
        with pytest.raises(RemoteError, match="this peer is in run"):
            await fetch_manifest(a.rpc, b.peer_id, "b" * 32, SOON)
    with pytest.raises(ProtocolViolation, match="not the one"):
        check_tokenizer(manifest, tokenizer + b" ")


async def test_a_joiner_gets_the_run_files_or_the_reason(tmp_path: Path) -> None:
    manifest = manifest_of(open_run=False)
    signed = sign_manifest(AUTHORITY, manifest)
    async with hosts(2, first=AUTHORITY) as (member, newcomer):
        Gate(member.rpc, manifest, None)
        serve_run_files(member.rpc, signed, b"")
        good = Invite(manifest.run_id, AUTHORITY.peer_id, member.addresses, token_for(manifest))
        assert await fetch_run_files(newcomer, good, tmp_path / "a") == (signed, b"")
        assert load_run_files(tmp_path / "a") == (signed, b"")
        with pytest.raises(NotAdmitted, match="no token"):
            await fetch_run_files(newcomer, msgspec.structs.replace(good, token=None), tmp_path / "b")
        with pytest.raises(NotAdmitted, match="this peer is in run"):
            await fetch_run_files(newcomer, msgspec.structs.replace(good, run_id="c" * 32), tmp_path / "c")


async def test_an_unreachable_address_has_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.run.bootstrap.TRIES", 1)
    stranger = Identity.generate().peer_id
    with trio.socket.socket() as silent, trio.socket.socket() as closed:
        await silent.bind(("127.0.0.1", 0))
        silent.listen(1)  # the kernel accepts, no process answers
        await closed.bind(("127.0.0.1", 0))
        async with hosts(2) as (a, b):
            wrong = b.addresses[0].replace(b.peer_id, stranger)
            refused = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{stranger}"
            mute = f"/ip4/127.0.0.1/tcp/{silent.getsockname()[1]}/p2p/{stranger}"
            dial = a.connect_address

            async def dial_quickly(address: str, timeout_s: float) -> str:
                return await dial(address, timeout_s=0.5 if address == mute else SOON)

            monkeypatch.setattr(a, "connect_address", dial_quickly)
            for addresses, reason in (
                ((refused,), "refused"),
                ((mute,), "timeout"),
                ((wrong,), "wrong_peer"),
                ((mute, refused), "refused"),
                ((mute, refused, wrong), "wrong_peer"),
            ):
                with pytest.raises(DialError) as caught:
                    await fetch_run_files(a, Invite("d" * 32, stranger, addresses), tmp_path)
                assert caught.value.reason == reason, str(caught.value)
                assert ": " in str(caught.value)


def test_damaged_run_files_are_noticed(tmp_path: Path) -> None:
    signed = sign_manifest(AUTHORITY, manifest_of(open_run=True))
    assert load_run_files(tmp_path) is None
    save_run_files(tmp_path, signed, b"")
    assert load_run_files(tmp_path) == (signed, b"")
    path = tmp_path / "manifest.msgpack"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="damaged"):
        load_run_files(tmp_path)


async def test_a_peer_dials_back_to_the_address_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swarm.membership.reachability.ASK_EVERY_S", 3600.0)
    monkeypatch.setattr("swarm.membership.reachability.CONNECT_S", SOON)
    with trio.socket.socket() as closed:
        await closed.bind(("127.0.0.1", 0))
        async with hosts(2) as (a, b):
            serve_dial_back(b)
            own = int(a.addresses[0].split("/")[4])
            ports = (own, closed.getsockname()[1])
            reply = (await a.rpc.call(b.peer_id, DIAL_BACK, DialBackRequest(ports), timeout_s=SOON)).body
            assert reply.seen_at == "127.0.0.1"
            assert dict(reply.outcomes) == {ports[0]: "open", ports[1]: "refused"}
            with pytest.raises(RemoteError, match="ask again"):
                await a.rpc.call(b.peer_id, DIAL_BACK, DialBackRequest(ports), timeout_s=SOON)


def test_a_home_without_an_invite_is_refused(tmp_path: Path) -> None:
    from swarm.client.session import read_saved_invite

    with pytest.raises(ConfigError, match="no peer's home"):
        read_saved_invite(tmp_path)
