"""Mutated calls of every method at running peers: each is answered or closed, and honest work goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
import trio

from dht.protocol import FIND
from dht.records import KIND as RECORD_KIND
from dht.records import Body
from peer.data.pages.cache import PageCache
from peer.data.pages.folder import BuiltPages
from peer.data.pages.index import encode_index
from peer.data.pages.library import PageLibrary
from peer.identity import Identity
from swarm.coordinator.second_process import serve_second
from swarm.membership.reachability import serve_dial_back
from swarm.membership.told_events import serve_events
from swarm.pages.server import serve_pages
from swarm.pipeline.data_feed import serve_tokens
from swarm.protocol import round_schedule
from swarm.protocol.agreement import messages as say
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.agreement.rules.electorate import leader_of
from swarm.protocol.messages import HEAD_REPORT
from swarm.protocol.plan import CONTRIBUTION_KIND, PLAN_KIND, Contribution
from swarm.run.gate import Gate
from swarm.run.manifest import sign_manifest
from swarm.run.manifest_transfer import serve_run_files
from swarm.state.upload_limits import SnapshotLimits, UploadSlots
from tests.dht.support.local_swarm import RUN, bare_host, local_swarm
from tests.fuzz.support.guard import MUTATIONS, chance_for
from tests.fuzz.support.instances import Instances, described
from tests.fuzz.support.resign import resigned
from tests.fuzz.support.strikes import Pool, Striker, Watch, plain
from tests.fuzz.support.wire_types import methods
from tests.peer.data.pages.data_sets import write_data_set
from tests.swarm.pipeline.test_source import read
from tests.swarm.run.test_gate import AUTHORITY, gate_of, hosts, manifest_of
from tests.swarm.support import gossip_group
from tests.swarm.support.hostile import BUNDLED, Scene, hostile_scene
from tests.swarm.support.pipeline_harness import head_at, open_replicas, rules_of, serving, without_haste

pytestmark = pytest.mark.slow

NOT_HERE = {"backup.held"}  # reads a stage number only; test_messages.py mutates it
CHECKED = {"bug", "peer_penalized"}  # the events that a scene looks at in the end
IDENTITY = Identity(bytes(32))
SIGNED: dict[str, type[msgspec.Struct]] = {
    **evidence.ONE_AN_ATTEMPT,
    CONTRIBUTION_KIND: Contribution,
    evidence.PROMISE: say.PromiseBody,
    evidence.START: say.StartBody,
    evidence.ENDORSEMENT: say.EndorsementBody,
    evidence.JOIN: say.JoinBody,
    evidence.WITNESS: say.WitnessBody,
}
"""All bodies that are signed in a round, by kind."""
FIELDS = {
    **{name: f"agreement.{name}" for name in ("proposal", "roster", "results", "promise", "vote", "start")},
    **{name: f"agreement.{name}" for name in ("endorsement", "join", "witness")},
    **{f"{name}s": f"agreement.{name}" for name in ("promise", "vote", "join")},
    "plan": PLAN_KIND,
    "contribution": CONTRIBUTION_KIND,
    "contributions": CONTRIBUTION_KIND,
}
"""Which kind of signed body a field of a message has."""
tried: set[str] = set()


def fitting(value: Any, made: Mapping[str, list[Any]]) -> Any:
    """Replace signed bodies inside a plain message by ones of the kind that its field must have."""
    if isinstance(value, list):
        return [fitting(part, made) for part in value]
    if not isinstance(value, dict):
        return value
    fitted = {}
    for name, part in value.items():
        known = made.get(FIELDS.get(name, ""), [])
        if known and isinstance(part, dict) and "body" in part:
            fitted[name] = known[len(part["body"]) % len(known)]
        elif known and isinstance(part, list):
            fitted[name] = known[: len(part)]
        else:
            fitted[name] = fitting(part, made)
    return fitted


def with_messages(signer: Identity, pool: dict[str, list[Any]], seed: str) -> Pool:
    """Add messages of every kind, with bodies that `signer` signed: first plain ones, then with those inside."""
    makes, made = Instances(chance_for(seed), pool), dict[str, list[Any]]()
    for _ in range(2):
        bodies = {
            kind: [msgspec.msgpack.encode(fitting(makes.plain(described(body)), made)) for _ in range(3)]
            for kind, body in SIGNED.items()
        }
        made = {kind: [plain(resigned(signer, kind, body)) for body in some] for kind, some in bodies.items()}
    kinds = get_args(say.Message)
    messages = {kind.__name__: [fitting(makes.plain(described(kind)), made) for _ in range(4)] for kind in kinds}
    return {**pool, **messages, "Signed": [*pool.get("Signed", []), *(one for some in made.values() for one in some)]}


def round_pool(scene: Scene) -> Pool:
    """Return the head, the members and the attempts of the victim's present round, and bodies signed by the liar, also
    with others' inside them."""
    victim, liar = scene.honest[0], scene.liar.member
    for member in (*scene.honest, liar):  # the liar's faults are many; those of others are looked at in the end
        member.events[:] = [e for e in member.events if e.name in CHECKED and e.fields.get("peer") != scene.liar.peer]
    scene.group.coordinator_events[:] = [e for e in scene.group.coordinator_events if e.name in CHECKED]
    node: Any = victim.driver.group._node
    instance, head = node._round.instance, victim.driver.group.head
    me, identity = liar.driver.me, liar.host.identity
    attempts = [n for n in range(64) if head.members and leader_of(head, head.hash, n) == me][:4]
    voted = [signed for cast in instance.votes.values() for _, signed in cast.values()]
    found = [signed for signed in (instance.signed_plan, *instance.rosters.values(), *voted) if signed is not None]
    listed = [name for hashes in [*victim.actor._slices.listed.values()][:2] for name in hashes]
    plans = [instance.plan.hash] if instance.plan is not None else []
    pool: dict[str, list[Any]] = {
        "Head": [plain(head)],
        "Member": [plain(me), plain(me), *(plain(member) for member in head.members)],
        "int": [head.round, head.round + 1, head.term, *attempts],
        "str": [*4 * [head.run_id], liar.peer, *(member.peer for member in head.members)],
        "bytes": [head.hash, head.hash, head.state_hash, head.previous, *plans, *[*instance.exchanges][:2], *listed],
        "ChainLink": [plain(link) for link in victim.driver.group.report().links],
    }
    pool["Signed"] = [plain(signed) for signed in found]
    return with_messages(identity, {name: values for name, values in pool.items() if values}, f"signed {head.round}")


@pytest.mark.parametrize("count", MUTATIONS)
async def test_rounds(tmp_path: Path, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_schedule, "BUNDLES_MAX", 3)  # of the five slices, so that two bundles have two
    async with hostile_scene(tmp_path, timeout_s=500.0 + count, schedule=BUNDLED) as scene:
        await scene.rounds(6)  # what is kept of the last rounds is there by then
        for victim in (scene.honest[0].host, scene.group.coordinator_host):
            striker = Striker(victim, scene.liar.peer, lambda: round_pool(scene), f"rounds {len(tried)}")
            with Watch(*(member.host for member in scene.honest), scene.group.coordinator_host):
                await striker.strike(40, frozenset({HEAD_REPORT.name}))  # answered, until the striker is banned
                await striker.strike(count)
            tried.update(striker.tried)
            assert {"answered", "closed"} <= set(striker.outcomes)
        await scene.rounds(1)
        assert not [event for event in scene.group.coordinator_events if event.name == "bug"]


@pytest.mark.parametrize("count", MUTATIONS)  # has workers of its own, and yet no `process`: see the last test
async def test_a_pipeline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    without_haste(monkeypatch)
    async with open_replicas(tmp_path, [1, 1]) as stages:
        rules = rules_of(2)
        async with serving(stages, rules):
            (first,), (second,) = stages
            serve_tokens(second.host.rpc, rules, read)
            for victim in (first, second):
                head = head_at(rules, victim.stage)
                pool = {"str": [*rules.groups, rules.run_id], "Head": [plain(head)], "int": [0, 2, 16]}
                other = (second if victim is first else first).peer
                striker = Striker(victim.host, other, lambda pool=pool: pool, f"stage {victim.stage}")  # type: ignore[misc]
                with Watch(victim.host):
                    await striker.strike(count)
                    assert not victim.seen("worker_died")
                    victim.events.clear()  # which only the test keeps
                tried.update(striker.tried)


@pytest.mark.parametrize("count", MUTATIONS)
async def test_gossip(tmp_path: Path, count: int) -> None:
    group = gossip_group.Group(tmp_path, "int8", rounds=10**6, min_peers=2)
    theta = gossip_group.noise(0)
    async with (
        group.join(theta, gossip_group.noise, pause_s=0.3) as one,
        group.join(theta, gossip_group.noise, pause_s=0.3) as other,
        trio.open_nursery() as nursery,
    ):
        for peer in (one, other):
            peer.stepping = peer.stands.clear  # copies of all states, which other tests look at
        nursery.start_soon(one.engine.run)
        nursery.start_soon(other.engine.run)
        with trio.fail_after(300):
            while one.engine.replica.round < 1:
                await trio.sleep(0.02)

        def pool() -> Pool:
            return {"int": [one.engine.replica.round, 0, 1], "bytes": [one.engine.replica.tree.root]}

        striker = Striker(one.host, other.host.peer_id, pool, "gossip")
        with Watch(one.host, other.host):
            await striker.strike(count)
        tried.update(striker.tried)
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("count", MUTATIONS)
async def test_the_dht(count: int) -> None:
    async with local_swarm() as swarm, bare_host(IDENTITY) as attacker:
        victim, _ = await swarm.grow(2)
        makes = Instances(chance_for("records"), {"str": [RUN, "card"], "int": [int(time.time() * 1e6), 1000]})
        records = [plain(resigned(IDENTITY, RECORD_KIND, makes.encoded(Body))) for _ in range(40)]
        pool = {"str": [RUN, *attacker.addresses], "Signed": records}
        striker = Striker(victim.host, attacker.peer_id, lambda: pool, "dht")
        with Watch(victim.host):
            await striker.strike(count)
        tried.update(striker.tried)
        assert FIND.name in striker.tried


@pytest.mark.parametrize("count", MUTATIONS)
async def test_pages(tmp_path: Path, count: int) -> None:
    index, _, _ = write_data_set(tmp_path, seq_len=7, windows=9)
    library = PageLibrary(index, PageCache(tmp_path, index, 0), BuiltPages(tmp_path, index))
    async with bare_host(IDENTITY) as victim, bare_host() as attacker:
        serve_pages(victim.rpc, encode_index(index), library, UploadSlots(SnapshotLimits()))
        attacker.book.add(victim.peer_id, victim.addresses)
        pool: Pool = {"bytes": [bytes.fromhex(index.config.root)], "int": [0, 1, index.pages]}
        striker = Striker(victim, attacker.peer_id, lambda: pool, "pages")
        with Watch(victim):
            await striker.strike(count)
        tried.update(striker.tried)


@pytest.mark.parametrize("count", MUTATIONS)
async def test_the_gate(count: int) -> None:
    manifest = manifest_of(open_run=False)
    async with hosts(3, first=AUTHORITY) as (victim, member, stranger):
        gate: Gate = gate_of(victim, manifest)
        serve_run_files(victim.rpc, sign_manifest(AUTHORITY, manifest), b"")
        serve_dial_back(victim)
        serve_events(victim)
        serve_second(victim)
        other = gate_of(member, manifest)
        await other.introduce(victim.peer_id, 60)
        pool: Pool = {"str": [manifest.run_id], "Link": [plain(link) for link in (*gate.chain, *other.chain)]}
        with Watch(victim):
            for attacker in (member, stranger):
                striker = Striker(victim, attacker.peer_id, lambda: pool, "gate")
                await striker.strike(count)
                tried.update(striker.tried)
        assert not victim.rpc.admissions.allows(stranger.peer_id, "client")


def test_every_method_was_tried() -> None:
    """Runs after the others, in their pass: files are never split between processes."""
    assert set(methods()) - tried <= NOT_HERE
