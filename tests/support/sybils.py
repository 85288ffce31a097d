"""Many identities of one host that crowd a run, in a process of their own.

    python -m tests.support.sybils INVITE IDENTITIES HOSTS MODE...

They dial from 127.0.66.1, so their address prefix is not that of the run's peers. Modes, which hosts take in turn:

    connect     connect and greet
    node        a DHT node with an id ground to the members' key, which names only its like and holds no records back
    record      publishes a record as of a member at every member
    ask         asks to join, and does nothing of what it is planned for

The first line of stdin is a JSON list of addresses to crowd. Any further line asks for a report. In an open run they
enter as any peer may; the invite of a closed run holds no key that they could use.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from dht.key import node_key, record_key
from dht.protocol import (
    FETCH,
    FIND,
    STORE,
    Contact,
    FetchReply,
    FetchRequest,
    FindReply,
    FindRequest,
    StoreReply,
    StoreRequest,
)
from dht.records import sign_record
from peer.errors import BarnraiseError, RemoteError
from peer.events import EventLog
from peer.identity import Identity, sign_body
from peer.net.host import Host, open_host
from peer.net.method import Call, Empty
from peer.net.reach import Reach
from swarm.membership.member_record import MEMBERS, MemberRecord
from swarm.protocol.agreement.messages import JoinBody, JoinMessage, PlanMessage
from swarm.protocol.agreement.rules import evidence
from swarm.protocol.head import Member
from swarm.protocol.messages import HEAD_REPORT, AskHead
from swarm.protocol.plan import WorkPlan
from swarm.rounds.messages import AGREE, MessageBatch
from swarm.run.bootstrap import enter_run
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import open_manifest
from tests.support.protocol_methods import made_up

SOURCE: Final = "127.0.66.1"
LIVES_S: Final = 4.0  # an identity, before its host takes another
ASKS_S: Final = 15.0  # one that asks to join: with the lowest priority it needs some rounds until it is planned for
PAUSE_S: Final = 0.5
CALL_S: Final = 3.0
TRIED: Final = 20  # identities, of which the nearest to the members' key is taken


@dataclass
class Crowd:
    """All identities of this process."""

    invite: Invite
    is_open: bool
    targets: list[str]
    identities: list[str] = field(default_factory=list)
    contacts: dict[str, tuple[str, ...]] = field(default_factory=dict)
    planned_max: int = 0
    """The most of them that one plan named."""
    answers: Counter[str] = field(default_factory=Counter)

    @property
    def members_key(self) -> bytes:
        return record_key(self.invite.run_id, MEMBERS.name, self.invite.run_id)


class Sybil:
    """One identity. `targets`: the ids of the peers that it reached."""

    def __init__(self, crowd: Crowd, host: Host, targets: list[str]) -> None:
        self._crowd, self._host, self._targets = crowd, host, targets
        self._me = Member(host.peer_id, "sybil")

    async def connect(self) -> None:
        await trio.sleep_forever()

    async def node(self) -> None:
        rpc, crowd = self._host.rpc, self._crowd

        async def find(call: Call[FindRequest]) -> FindReply:
            nodes = [Contact(peer, addresses) for peer, addresses in list(crowd.contacts.items())[-16:]]
            return FindReply(tuple(nodes), True, time.time() + 3600)

        async def store(call: Call[StoreRequest]) -> StoreReply:
            return StoreReply(True, int(time.time() * 1e6), time.time() + 3600)

        async def fetch(call: Call[FetchRequest]) -> tuple[FetchReply, bytes]:
            return FetchReply(time.time() + 3600), msgspec.msgpack.encode([])

        rpc.register(FIND, find)
        rpc.register(STORE, store)
        rpc.register(FETCH, fetch)
        while True:
            run_id, addresses = crowd.invite.run_id, self._host.addresses[:8]
            for peer in self._targets:
                await self._call(peer, FIND, FindRequest(run_id, addresses, crowd.members_key))
            await trio.sleep(PAUSE_S)

    async def record(self) -> None:
        run_id, host = self._crowd.invite.run_id, self._host
        while True:
            now = time.time()
            fields = {
                "session": "s", "name": "n" * 64, "role": "full", "version": "source", "phase": "training", "at": now,
                "addresses": list(host.addresses), "joined_at": now, "term": 1, "round": 5,
            }  # fmt: skip
            value, issued_us = made_up(MemberRecord, fields, zero=True), int(now * 1e6)
            signed = sign_record(host.identity, run_id, MEMBERS, run_id, value, ttl_s=9.0, issued_us=issued_us)
            for peer in self._targets:
                await self._call(peer, STORE, StoreRequest(run_id, host.addresses[:8], signed))
            await trio.sleep(PAUSE_S)

    async def ask(self) -> None:
        rpc, crowd, host = self._host.rpc, self._crowd, self._host

        async def hear(call: Call[MessageBatch]) -> Empty:
            for message in call.body.messages:
                if isinstance(message, PlanMessage):
                    plan = msgspec.msgpack.decode(message.plan.body, type=WorkPlan)
                    ours = sum(a.member.peer in crowd.identities for a in plan.assignments)
                    crowd.planned_max = max(crowd.planned_max, ours)
            return Empty()

        rpc.register(AGREE, hear)
        while True:
            for peer in self._targets:
                report = await self._call(peer, HEAD_REPORT, AskHead())
                if report is not None:
                    wish = sign_body(host.identity, evidence.JOIN, JoinBody(report.head.hash, self._me))
                    await self._call(peer, AGREE, MessageBatch(report.head.run_id, (JoinMessage(wish),)))
            await trio.sleep(PAUSE_S)

    async def _call(self, peer: str, method: Any, body: Any) -> Any:
        code, reply = "", None
        try:
            reply = (await self._host.rpc.call(peer, method, body, timeout_s=CALL_S)).body
        except RemoteError as error:
            code = error.code
        except BarnraiseError as error:
            code = type(error).__name__
        self._crowd.answers[f"{method.name}: {code}"] += 1
        return reply


async def live(crowd: Crowd, mode: str) -> None:
    """Live for a while as a new identity."""
    identity = Identity.generate()
    if mode == "node":
        key = int.from_bytes(crowd.members_key, "big")
        tried = [identity, *(Identity.generate() for _ in range(TRIED))]
        identity = min(tried, key=lambda one: node_key(one.peer_id) ^ key)
    config = open_host(identity=identity, events=EventLog(), reach=Reach((f"/ip4/{SOURCE}/tcp/0",)))
    with tempfile.TemporaryDirectory() as folder:
        async with config as host:
            crowd.identities.append(host.peer_id)
            crowd.contacts[host.peer_id] = host.addresses[:8]
            with suppress(
                BarnraiseError
            ):  # into a closed run they cannot; without a gate their calls leave all the same
                if crowd.is_open:
                    await enter_run(host, crowd.invite, Home(Path(folder)), (), open_manifest)
            targets = []
            for address in crowd.targets:
                with suppress(BarnraiseError):
                    targets.append(await host.connect_address(address, timeout_s=CALL_S))
            with trio.move_on_after(ASKS_S if mode == "ask" else LIVES_S):
                await getattr(Sybil(crowd, host, targets), mode)()
            crowd.contacts.pop(host.peer_id)


async def main(text: str, identities: int, hosts: int, modes: list[str]) -> None:
    trio.open_tcp_stream = partial(trio.open_tcp_stream, local_address=SOURCE)
    invite = Invite.parse(text)
    crowd = Crowd(msgspec.structs.replace(invite, key=b"", chain=()), not invite.chain, [])

    async def use(number: int) -> None:
        while len(crowd.identities) < identities:
            await live(crowd, modes[number % len(modes)])

    async with trio.open_nursery() as nursery:
        stdin = trio.lowlevel.FdStream(0)
        while line := await stdin.receive_some():
            if not crowd.targets:
                crowd.targets = json.loads(line)
                for number in range(hosts):
                    nursery.start_soon(use, number)
            report = {"planned_max": crowd.planned_max, "answers": crowd.answers, "peers": crowd.identities}
            sys.stdout.write(json.dumps(report) + "\n")
            sys.stdout.flush()
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    trio.run(main, sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
