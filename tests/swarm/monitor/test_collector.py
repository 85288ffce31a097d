"""The collector and its web server over real sockets: a small run, and members that answer nonsense or nothing."""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families

from cli.progress.kept_home import kept_home
from dht.node import NodeConfig, open_node
from peer.events import EventLog
from peer.identity import Identity
from peer.net.host import Host, open_host
from peer.net.method import Call
from swarm.inference.record import SERVERS, server_schema, servers_key
from swarm.membership.member_record import MEMBERS, MemberRecord, member_record, member_schema
from swarm.membership.membership import Membership
from swarm.membership.told_events import EVENTS, AskEvents, EventPage, ToldEvent, serve_events
from swarm.monitor import collector as collector_module
from swarm.monitor import member_events
from swarm.monitor.app import monitor_app
from swarm.monitor.collector import MonitorCollector
from swarm.monitor.history.memory import History, open_history
from swarm.protocol.head import Member
from swarm.protocol.messages import HeadReport
from swarm.run.gate import Gate
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest, sign_manifest
from swarm.run.manifest_transfer import serve_run_files
from swarm.status.head_chain import HeadChain, follow_history, took_part
from swarm.web.listening import ListenAddress, serve_http
from tests.cli.support.kept_scene import ended_run, home_of, home_of_a_member
from tests.swarm.gateway.scripted import Site, answer_of
from tests.swarm.membership.test_proven_heads import group_and_client
from tests.swarm.placement.test_stages import manifest_of
from tests.swarm.run.test_gate import AUTHORITY, invite_to
from tests.swarm.run.test_served_model import TOKENIZER, served_model
from tests.swarm.status.scenes import server
from tests.swarm.support.stage_commits import begun, serve_head_report, started

NAME = "<script>alert(1)</script>"


async def garbage(call: Call[AskEvents]) -> EventPage:
    return EventPage("", (ToldEvent(0.0, "worker_died", {}),), 0)


async def nothing(call: Call[AskEvents]) -> EventPage:
    await trio.sleep_forever()
    raise AssertionError


def _same(record: MemberRecord) -> MemberRecord:
    return record


@asynccontextmanager
async def small_run() -> AsyncIterator[tuple[Invite, Manifest, list[Host]]]:
    """The authority, which tells of a term with two members, one of which answers nonsense and one nothing."""
    manifest = msgspec.structs.replace(manifest_of(1), authority=AUTHORITY.peer_id)
    async with AsyncExitStack() as stack:
        opened = [
            await stack.enter_async_context(open_host(identity=identity, events=EventLog()))
            for identity in (AUTHORITY, Identity.generate(), Identity.generate())
        ]
        first, liar, silent = opened
        serve_run_files(first.rpc, sign_manifest(AUTHORITY, manifest), TOKENIZER)
        serve_events(first)
        liar.rpc.register(EVENTS, garbage)
        silent.rpc.register(EVENTS, nothing)
        members = [Member(host.peer_id, "s") for host in opened[1:]]
        proved = started(AUTHORITY, begun(manifest.first_head(), *members))
        for host, name in zip(opened, ("coordinator", NAME, "silent"), strict=True):
            gate = Gate(host.rpc, manifest, host.identity)
            serve_head_report(host, HeadReport(proved.head, Member(host.peer_id, "s"), "training", proved.links))
            joined = () if host is first else first.addresses
            node = await stack.enter_async_context(
                open_node(host, NodeConfig(manifest.run_id, joined), [member_schema(gate)])
            )
            role: Any = "coordinator" if host is first else "full"
            record = member_record(
                host, proved.head, session="s", name=name, role=role, phase="training", joined_at=0.0
            )
            await Membership(node, host, MEMBERS, manifest.run_id, partial(_same, record)).announce()
        first.events.emit("quorum_lost", round=0, address="/ip4/10.1.2.3/tcp/1")
        yield Invite(manifest.run_id, manifest.authority, tuple(first.addresses)), manifest, opened


@asynccontextmanager
async def open_monitor(collector: MonitorCollector, token: str = "") -> AsyncIterator[Site]:
    """Serve the collector's state inside the block."""
    async with trio.open_nursery() as nursery:
        urls, listening = list[str](), trio.Event()

        def tell(url: str) -> None:
            urls.append(url)
            listening.set()

        app = monitor_app(collector, History(Path("unopened"), "r" * 32), token, "127.0.0.1")
        nursery.start_soon(serve_http, app, ListenAddress("127.0.0.1", 0), tell)
        await listening.wait()
        yield Site(urls[0])
        nursery.cancel_scope.cancel()


async def test_a_run_with_members_that_answer_nonsense_or_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(member_events, "CALL_S", 0.5)
    async with small_run() as (invite, manifest, (first, liar, silent)):
        collector = MonitorCollector(invite)
        with trio.fail_after(300):
            state = await collector.once()
        assert (state.kind, state.name, state.run_id) == ("run", manifest.run.name, manifest.run_id)
        members = {member.peer: member for member in state.members}
        assert {peer: member.seen.events for peer, member in members.items()} == {
            first.peer_id: "told", liar.peer_id: "garbage", silent.peer_id: "silent"
        }  # fmt: skip
        claims = members[liar.peer_id].claims
        assert claims is not None and claims.name == NAME and members[liar.peer_id].facts.membership == "member"
        assert [stage.facts.members for stage in state.stages if stage.facts] == [2]
        assert "the run cannot go on from round 0" in [line.text for line in state.log]
        text = msgspec.json.encode(state).decode()
        assert "127.0.0.1" not in text and "10.1.2.3" not in text, "no address is told"
        async with open_monitor(collector) as site:
            await _check_surface(site, manifest)


async def _check_surface(site: Site, manifest: Manifest) -> None:
    status, headers, body = await site.ask("GET", "/api/v1/state")
    assert status == 200 and headers["cache-control"] == "no-store"
    assert json.loads(body)["verdict"]["word"] and json.loads(body)["run_id"] == manifest.run_id
    status, headers, page = await site.ask("GET", "/")
    assert status == 200 and headers["content-security-policy"].startswith("default-src 'self'")
    assert b"<script>alert" not in page and b"http" not in page, "the page asks no other machine"
    for name in re.findall(rb'(?:src|href)="([^"/]+\.(?:js|css|svg))"', page):
        status, headers, content = await site.ask("GET", f"/{name.decode()}")
        assert status == 200 and content and headers["x-content-type-options"] == "nosniff", name
    assert (await site.ask("GET", "/healthz"))[0] == 200
    _, headers, text = await site.ask("GET", "/metrics")
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    families = {family.name: family for family in text_string_to_metric_families(text.decode())}
    [members] = families["barnraise_members"].samples
    assert (members.labels, members.value) == ({"stage": "0"}, 2)
    labels = {label for family in families.values() for sample in family.samples for label in sample.labels}
    assert labels <= {"level", "run", "version", "method", "codec", "role", "link", "stage", "state", "outcome"}
    status, headers, body = await site.ask("GET", "/api/v1/history?span=all")
    assert (status, headers["cache-control"]) == (200, "no-store") and json.loads(body)["span"] == "all"
    for wrong in ("span=year", "stage=1", "stage=-1", "stage=%00", "span=hour&stage=0x0"):
        assert (await site.ask("GET", f"/api/v1/history?{wrong}"))[0] == 400, wrong
    assert (await site.ask("GET", "/other"))[0] == 404 and (await site.ask("POST", "/api/v1/state"))[0] == 405
    status, _, refused = await site.ask("GET", "/api/v1/state", Host="evil.example")
    assert status == 403 and manifest.run_id.encode() not in refused


async def test_the_stream_brings_each_new_state_and_ends_with_its_client() -> None:
    collector = MonitorCollector(Invite("r" * 32, AUTHORITY.peer_id, ()))
    async with open_monitor(collector) as site:
        for _ in range(70):  # more than there may be at once
            stream = await site.open()
            await stream.send_all(site.head("GET", "/api/v1/stream", 0))
            data = bytearray()
            with trio.fail_after(30):
                while b"data: {" not in data:
                    data += await stream.receive_some()
            assert data.startswith(b"HTTP/1.1 200 "), data[:80]
            await stream.aclose()
        stream = await site.open()
        await stream.send_all(site.head("GET", "/api/v1/stream", 0))
        data = bytearray()
        with trio.fail_after(30):
            while b"data: {" not in data:
                data += await stream.receive_some()
            await collector._publish(msgspec.structs.replace(collector.state, name="later"))
            while b'"name":"later"' not in data:
                data += await stream.receive_some()
        await stream.aclose()


async def test_a_token_is_needed_and_never_told() -> None:
    collector = MonitorCollector(Invite("r" * 32, AUTHORITY.peer_id, ()))
    async with open_monitor(collector, token="right") as site:
        assert (await site.ask("GET", "/api/v1/state"))[0] == 401
        assert (await site.ask("GET", "/api/v1/state", Authorization="Bearer wrong"))[0] == 401
        assert (await site.ask("GET", "/?token=wrong"))[0] == 401
        assert (await site.ask("GET", "/api/v1/state", Authorization="Bearer right"))[0] == 200
        status, headers, _ = await site.ask("GET", "/?token=right")
        assert (status, headers["location"]) == (303, "/") and "httponly" in headers["set-cookie"]
        cookie = headers["set-cookie"].partition(";")[0]
        assert (await site.ask("GET", "/api/v1/state", Cookie=cookie))[0] == 200
        status, _, body = await site.ask("GET", "/healthz")
        assert status == 503 and b"no recent reading" in body and b"rrrr" not in body
        async with await site.open() as stream:
            await stream.send_all(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer \xff\xfe\r\n\r\n")
            await stream.send_eof()
            assert (await answer_of(stream))[0] in (400, 401)


async def test_a_served_model(tmp_path: Path) -> None:
    manifest = served_model()
    async with AsyncExitStack() as stack:
        host = await stack.enter_async_context(open_host(identity=AUTHORITY, events=EventLog()))
        gate = Gate(host.rpc, manifest, AUTHORITY)
        serve_run_files(host.rpc, sign_manifest(AUTHORITY, manifest), TOKENIZER)
        serve_events(host)
        node = await stack.enter_async_context(open_node(host, NodeConfig(manifest.run_id), [server_schema(gate)]))
        record = server(0, 3, credential=gate.chain)
        await Membership(node, host, SERVERS, servers_key(manifest.run_id), lambda: record).announce()
        with trio.fail_after(300):
            home, _ = home_of(tmp_path / "h", manifest)  # of a peer that is gone, while others answer
            collector = MonitorCollector(
                invite_to(manifest, host.addresses),
                read_home=lambda: kept_home(home, manifest.run_id, time.time()),
            )
            state = await collector.once()
    assert state.home is None
    assert state.kind == "model" and [(row.first, row.end, row.servers) for row in state.blocks] == [
        (0, 3, 1),
        (3, 4, 0),
    ]
    assert state.verdict.remedy == "start one with `peer serve INVITE --blocks 3:4`"


async def test_a_run_that_cannot_be_reached_is_told_in_words_and_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collector_module, "AGAIN_S", 0.01)
    address = f"/ip4/127.0.0.1/tcp/1/p2p/{AUTHORITY.peer_id}"
    collector = MonitorCollector(Invite("r" * 32, AUTHORITY.peer_id, (address,)))
    async with trio.open_nursery() as nursery:
        nursery.start_soon(collector.run)
        with trio.fail_after(300):
            await collector.changed()
            state = await collector.changed()
        nursery.cancel_scope.cancel()
    assert (state.kind, state.verdict.word, state.monitor.failed) == ("unknown", "not reached", 2)
    assert "no peer could be reached" in state.verdict.reason and b"127.0.0.1" not in msgspec.json.encode(state)


async def test_what_a_home_keeps_stands_apart_from_what_is_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collector_module, "AGAIN_S", 0.01)
    manifest = ended_run(name=NAME)
    home, invite = home_of_a_member(tmp_path / "h", manifest, name=NAME)
    async with open_history(tmp_path / "db", manifest.run_id) as history:
        collector = MonitorCollector(
            invite,
            home,
            remember=history.note,
            read_home=lambda: kept_home(home, manifest.run_id, time.time()),
        )
        async with trio.open_nursery() as nursery:
            nursery.start_soon(collector.run)
            with trio.fail_after(300):
                await collector.changed()
                state = await collector.changed()
            nursery.cancel_scope.cancel()
        assert state.home is not None and state.home.heads[0].round == 3 and state.name == NAME
        assert (state.verdict.level, state.verdict.word) == ("unknown", "not reached")
        assert "of the past" in state.verdict.reason and "peer export" in state.verdict.remedy
        assert not (state.stages or state.members or state.rounds or state.loss or state.log), "nothing was seen"
        assert (await history.view("all", fresh=True)).losses == {}
        async with open_monitor(collector) as site:
            _, _, body = await site.ask("GET", "/api/v1/state")
            assert json.loads(body)["home"]["losses"][-1]["train"] == 2.0
            assert b"barnraise_loss" not in (await site.ask("GET", "/metrics"))[2]


@pytest.mark.slow
async def test_rounds_of_a_real_group_are_read_back_and_followed(tmp_path: Path) -> None:
    async with group_and_client(tmp_path, "witness", 5) as (group, client):
        names = [member.peer for member in group.members]
        [proven] = await client.asks(*names)
        chain = HeadChain()
        await follow_history(client.host, chain, proven, 100.0)
        assert [head.round for head in chain.heads if head.attempt >= 0] == [1, 2, 3, 4, 5]
        await follow_history(client.host, chain, proven, 105.0)
        assert not chain.wants_older, "no peer keeps more"
        assert set(took_part(chain.heads[-1])) <= set(names) and chain.counts == {}
        late = HeadChain()
        late.advance(chain.heads[2], [], 90.0)
        await follow_history(client.host, late, proven, 100.0)
        assert late.heads == chain.heads and late.counts["committed"] == 5 - chain.heads[2].round
