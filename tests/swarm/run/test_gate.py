"""The gate of a run between real hosts: introductions, bans, run files, dialling back."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
import trio
from blake3 import blake3

from peer.errors import CheckpointError, ConfigError, DialError, NotAdmitted, ProtocolViolation, RemoteError
from peer.events import EventLog
from peer.identity import Identity, Signed, sign_bytes
from peer.net.host import Host, open_host
from peer.net.rpc import Call, Method
from swarm.membership.reachability import DIAL_BACK, DialBackRequest, serve_dial_back
from swarm.run.ban_list import BanList, sign_bans
from swarm.run.bootstrap import EnteredRun, enter_run
from swarm.run.gate import ENTER, PROVE, Entry, EntryReply, Gate, Proof
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.inviting import make_invite
from swarm.run.manifest import PROTOCOL_VERSION, AnyManifest, Manifest, open_manifest, sign_manifest
from swarm.run.manifest_transfer import (
    MANIFEST,
    AskManifest,
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
ANYWHERE = f"/ip4/127.0.0.1/tcp/1/p2p/{AUTHORITY.peer_id}"
SOON = 60.0


class Word(msgspec.Struct, frozen=True):
    text: str


ECHO = Method("test.echo", Word, Word)


async def echo(call: Call[Word]) -> Word:
    return call.body


def manifest_of(*, open_run: bool, **changes: object) -> Manifest:
    rules: dict[str, object] = {"run": RunRules(name="gated", open=open_run)}
    return make_manifest(AUTHORITY.peer_id, **(rules | changes))


def invite_to(manifest: AnyManifest, addresses: Sequence[str] = (ANYWHERE,), guests: int = 9) -> Invite:
    return make_invite(AUTHORITY, (), manifest, addresses, guests=guests, days=1)


def gate_of(host: Host, manifest: AnyManifest) -> Gate:
    """Guard a host of a member that came by an invite of its own."""
    return Gate(host.rpc, manifest, host.identity, invite_to(manifest).membership(host.identity))


@asynccontextmanager
async def hosts(count: int, *, first: Identity | None = None) -> AsyncIterator[list[Host]]:
    """`count` hosts on loopback that know each other's addresses; each serves ECHO."""
    if count == 0:
        yield []
        return
    config = open_host(identity=first or Identity.generate(), events=EventLog())
    async with config as host, hosts(count - 1) as rest:
        host.rpc.register(ECHO, echo)
        for other in rest:
            host.book.add(other.peer_id, other.addresses)
            other.book.add(host.peer_id, host.addresses)
        yield [host, *rest]


async def hear(host: Host, other: Host) -> str:
    return (await host.rpc.call(other.peer_id, ECHO, Word("hi"), timeout_s=SOON)).body.text


async def test_an_open_run_asks_for_an_introduction_only() -> None:
    manifest = manifest_of(open_run=True)
    async with hosts(3) as (a, b, stranger):
        gate_of(a, manifest)
        gate_of(b, manifest)
        assert await hear(a, b) == "hi"
        with pytest.raises(RemoteError, match="introduce yourself"):
            await hear(stranger, b)
        with pytest.raises(RemoteError, match=r"does not serve run\.enter"):
            await hear(a, stranger)


async def test_strangers_are_refused_and_members_introduce_themselves() -> None:
    manifest = manifest_of(open_run=False)
    async with hosts(3) as (a, b, stranger):
        for host in (a, b):
            gate_of(host, manifest)
        with pytest.raises(RemoteError) as caught:
            await hear(stranger, b)
        assert caught.value.code == "NotAdmitted"
        assert await hear(a, b) == "hi"  # introduced first: all inside the call
        assert await hear(b, a) == "hi"


async def test_a_peer_that_forgot_the_caller_is_introduced_again() -> None:
    manifest = manifest_of(open_run=False)
    async with hosts(2) as (a, b):
        gate_of(a, manifest)
        gate_of(b, manifest)
        assert await hear(a, b) == "hi"
        b.admissions.revoke(a.peer_id)
        assert await hear(a, b) == "hi"


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ("missing", "carries no key"),
        ("foreign", "forged, damaged or of another run"),
        ("of another peer", "made out to"),
        ("wrong run", "in another run"),
        ("other version", "protocol version"),
    ],
)
async def test_a_refused_peer_gets_the_reason(case: str, words: str) -> None:
    manifest = manifest_of(open_run=False)
    async with hosts(2) as (a, b):
        gate = gate_of(b, manifest)
        nonce = bytes(32)
        own = invite_to(manifest).membership(a.identity)
        good = Entry(PROTOCOL_VERSION, gate._run_hash(nonce), nonce, own, 0)
        changes: dict[str, dict[str, object]] = {
            "missing": {"chain": ()},
            "foreign": {"chain": (msgspec.structs.replace(own[0], guests=1024), own[1])},
            "of another peer": {"chain": invite_to(manifest).membership(AUTHORITY)},
            "wrong run": {"run": bytes(32)},
            "other version": {"protocol": PROTOCOL_VERSION + 1},
        }
        with pytest.raises(RemoteError, match=words) as caught:
            await a.rpc.call(b.peer_id, ENTER, msgspec.structs.replace(good, **changes[case]), timeout_s=SOON)
        assert caught.value.code == "NotAdmitted"
        assert manifest.run_id not in caught.value.message
        await a.rpc.call(b.peer_id, ENTER, good, timeout_s=SOON)


async def test_neither_half_of_a_proof_serves_another_peer() -> None:
    """A stranger in the middle relays the moves of two members, and replays what it has recorded."""
    manifest = manifest_of(open_run=False)
    async with hosts(3) as (a, b, middle):
        gate = gate_of(b, manifest)
        gate_of(a, manifest)
        recorded: list[Entry] = []

        async def relay(call: Call[Entry]) -> EntryReply:
            recorded.append(call.body)
            return (await middle.rpc.call(b.peer_id, ENTER, call.body, timeout_s=SOON)).body

        middle.rpc.register(ENTER, relay)
        with pytest.raises(RemoteError, match="made out to"):  # by b: the chain is not that of the middle
            await hear(a, middle)
        nonce = bytes(32)
        own = Entry(PROTOCOL_VERSION, gate._run_hash(nonce), nonce, invite_to(manifest).membership(a.identity), 0)
        reply = (await a.rpc.call(b.peer_id, ENTER, own, timeout_s=SOON)).body
        for dialler, answerer in ((b.peer_id, a.peer_id), (middle.peer_id, b.peer_id), (a.peer_id, middle.peer_id)):
            swapped = gate._statement(dialler, answerer, nonce, reply.nonce)
            proof = Proof(sign_bytes(a.identity, "enter", swapped + b"dialler"))
            with pytest.raises(RemoteError, match=r"wrong signature|no challenge"):
                await a.rpc.call(b.peer_id, PROVE, proof, timeout_s=SOON)
        for entry in recorded:
            with pytest.raises(RemoteError, match="made out to"):
                await middle.rpc.call(b.peer_id, ENTER, entry, timeout_s=SOON)
        assert not b.admissions.allows(middle.peer_id, "client")


async def test_a_client_reads_and_takes_no_part() -> None:
    manifest = manifest_of(open_run=False)
    read = Method("test.read", Word, Word, access="client")
    async with hosts(2) as (client, member):
        gate_of(member, manifest)
        member.rpc.register(read, echo)
        chain = invite_to(manifest).client_chain(client.peer_id, None, time.time())
        Gate(client.rpc, manifest, client.identity, chain)
        assert (await client.rpc.call(member.peer_id, read, Word("hi"), timeout_s=SOON)).body == Word("hi")
        with pytest.raises(RemoteError, match="is for members of the run"):
            await hear(client, member)
        with pytest.raises(ProtocolViolation, match="has not proved"):  # nor is it called as a member
            await hear(member, client)
        assert not member.admissions.is_trusted(client.peer_id) and client.admissions.is_trusted(member.peer_id)


async def test_admission_ends_with_the_last_connection() -> None:
    manifest = manifest_of(open_run=False)
    async with hosts(2) as (a, b):
        gate_of(a, manifest)
        gate_of(b, manifest)
        assert await hear(a, b) == "hi"
        assert a.admissions.allows(b.peer_id, "member") and b.admissions.allows(a.peer_id, "member")
        await a.disconnect(b.peer_id)
        with trio.fail_after(SOON):
            while a.admissions.allows(b.peer_id, "client") or b.admissions.allows(a.peer_id, "client"):
                await trio.sleep(0.01)
        assert await hear(b, a) == "hi"


async def test_bans_take_effect_at_once_and_spread_with_introductions() -> None:
    manifest = manifest_of(open_run=True)
    async with hosts(4) as (a, b, c, banned):
        gates = {host: gate_of(host, manifest) for host in (a, b, c, banned)}
        assert await hear(banned, b) == "hi"
        gates[a].learn_bans(sign_bans(AUTHORITY, BanList(manifest.run_id, 2, peers=frozenset({banned.peer_id}))))
        await gates[a].introduce(b.peer_id, SOON)  # pushed
        await gates[c].introduce(b.peer_id, SOON)  # pulled
        assert gates[c].bans == gates[b].bans == gates[a].bans
        for member in (b, c):
            with pytest.raises(RemoteError, match="banned"):
                await hear(banned, member)
            with pytest.raises(ProtocolViolation, match="has not proved"):
                member.rpc.introduce = None
                await hear(member, banned)
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
        with pytest.raises(RemoteError, match="in another run"):
            await fetch_manifest(a.rpc, b.peer_id, "b" * 32, SOON)
    with pytest.raises(ProtocolViolation, match="not the one"):
        check_tokenizer(manifest, tokenizer + b" ")


async def test_a_joiner_gets_the_run_files_or_the_reason(tmp_path: Path) -> None:
    manifest = manifest_of(open_run=False)
    signed = sign_manifest(AUTHORITY, manifest)

    async def enter(host: Host, invite: Invite, folder: str) -> EnteredRun[Manifest]:
        return await enter_run(host, invite, Home(tmp_path / folder), invite.membership(host.identity), open_manifest)

    async with hosts(5, first=AUTHORITY) as (member, *newcomers):
        Gate(member.rpc, manifest, AUTHORITY)
        serve_run_files(member.rpc, signed, b"")
        good = invite_to(manifest, member.addresses, guests=1)
        entered = await enter(newcomers[0], good, "a")
        assert (entered.signed, entered.tokenizer) == (signed, b"")
        assert load_run_files(tmp_path / "a") == (signed, b"")
        assert await hear(newcomers[0], member) == "hi"
        with pytest.raises(NotAdmitted, match="brought in 1 peers"):
            await enter(newcomers[1], good, "b")
        with pytest.raises(NotAdmitted, match="carries no key"):
            await enter(newcomers[2], msgspec.structs.replace(good, chain=(), key=b""), "c")
        with pytest.raises(NotAdmitted, match="in another run"):
            await enter(newcomers[3], msgspec.structs.replace(good, run_id="c" * 32), "d")


async def test_a_stranger_cannot_turn_a_joiner_away(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its address comes before the coordinator's in the invite. Nor does it get anything while it is asked."""
    monkeypatch.setattr("swarm.run.bootstrap.TRIES", 1)
    manifest = manifest_of(open_run=False)
    signed = sign_manifest(AUTHORITY, manifest)

    asked_back: list[str] = []

    async def refuse(call: Call[AskManifest]) -> Signed:
        with pytest.raises(RemoteError) as caught:
            await hear_from(call.peer)
        asked_back.append(caught.value.code)
        raise NotAdmitted("you are thrown out")

    async with hosts(4, first=AUTHORITY) as (member, stranger, newcomer, late):
        Gate(member.rpc, manifest, AUTHORITY)
        serve_run_files(member.rpc, signed, b"")

        async def hear_from(peer: str) -> None:
            await stranger.rpc.call(peer, ECHO, Word("hi"), timeout_s=SOON)

        stranger.rpc.register(MANIFEST, refuse)
        invite = invite_to(manifest, (*stranger.addresses, *member.addresses))
        home, chain = Home(tmp_path / "a"), invite.membership(newcomer.identity)
        assert (await enter_run(newcomer, invite, home, chain, open_manifest)).signed == signed
        alone = msgspec.structs.replace(invite, addresses=stranger.addresses)
        with pytest.raises(NotAdmitted, match="thrown out"):
            await enter_run(late, alone, Home(tmp_path / "b"), alone.membership(late.identity), open_manifest)
    assert asked_back == ["NotAdmitted"] * 2


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
                    await enter_run(a, Invite("d" * 32, stranger, addresses), Home(tmp_path), (), open_manifest)
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
    from swarm.run.invite import read_saved_invite

    with pytest.raises(ConfigError, match="no peer's home"):
        read_saved_invite(tmp_path)
