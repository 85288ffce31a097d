"""A guest of a run that was once its only member, and signs another history after the run's first head.

It has the key and the records of a `peer join` that has ended. It enters the run with its own invite, publishes a
record as any member, shows its history to peers by the calls of the agreement, and answers who looks for heads with
it."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Final

import msgspec
import trio

from dht.node import NodeConfig, open_node
from peer.errors import BarnraiseError
from peer.events import EventLog
from peer.identity import Identity, sign_body
from peer.net.host import Host, open_host
from swarm.membership.member_record import MEMBERS, member_record, member_schema
from swarm.membership.membership import Membership
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.chain import position_of
from swarm.protocol.agreement.records import links_in
from swarm.protocol.agreement.rules.evidence import VOTE
from swarm.protocol.head import Head
from swarm.protocol.messages import HeadReport
from swarm.rounds.messages import AGREE, MessageBatch
from swarm.rounds.records import RecordFiles
from swarm.run.bootstrap import enter_run
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import open_manifest
from tests.swarm.support.stage_commits import serve_head_report

ROUNDS: Final = 200
STATE: Final = bytes([7]) * 32
CALL_S: Final = 30.0


class Forger:
    """The guest, and its `history`, from the coordinator's start of the run's only term."""

    def __init__(self, host: Host, start: msg.ChainLink) -> None:
        self.host, [self.me] = host, start.head.members
        assert self.me.peer == host.peer_id, "it was the only member"
        links = [start]
        for _ in range(ROUNDS):
            links.append(self._after(links[-1].head))
        self.history: Sequence[msg.ChainLink] = tuple(links)
        serve_head_report(host, HeadReport(self.head, self.me, "training", self.history))

    @property
    def head(self) -> Head:
        return self.history[-1].head

    def _after(self, before: Head) -> msg.ChainLink:
        head = msgspec.structs.replace(
            before, round=before.round + 1, previous=before.hash, state_hash=STATE, attempt=0
        )
        body = msg.VoteBody(before.hash, 0, head.hash, self.me)
        return msg.ChainLink(head, votes=(sign_body(self.host.identity, VOTE, body),))

    async def show(self, *peers: str) -> int:
        """Say to these peers where it stands, and show all that leads there; return how many calls were answered."""
        answered = 0
        pages = [self.history[n : n + msg.LINKS_MAX] for n in range(0, len(self.history), msg.LINKS_MAX)]
        status = msg.StatusMessage(position_of(self.head), self.head.hash, self.me, False, 0)
        messages: list[msg.Message] = [status, *(msg.ChainMessage(tuple(page)) for page in pages)]
        for peer in peers:
            for message in messages:
                try:
                    await self.host.rpc.call(peer, AGREE, MessageBatch(self.head.run_id, (message,)), timeout_s=CALL_S)
                    answered += 1
                except BarnraiseError:  # a peer may refuse it
                    continue
        return answered


@asynccontextmanager
async def open_forger(home: Path, folder: Path, invite_file: Path) -> AsyncIterator[Forger]:
    """Run the guest of that `home` in this process, with what it needs in `folder`."""
    identity = Identity.load_or_create(Home(home).identity)
    start = next(record.link for record in links_in(RecordFiles(Home(home).agreement).read()) if record.link.start)
    invite, own = Invite.parse(invite_file.read_text()), Home(folder)
    folder.mkdir()
    async with open_host(identity=identity, events=EventLog()) as host:
        entered = await enter_run(host, invite, own, invite.membership(identity), open_manifest)
        async with (
            open_node(
                host, NodeConfig(invite.run_id, invite.addresses, own.addresses), [member_schema(entered.gate)]
            ) as node,
            trio.open_nursery() as nursery,
        ):
            forger = Forger(host, start)

            def record() -> object:
                made = member_record(
                    host, forger.head, session="s", name="forger", role="full", phase="training", joined_at=time.time()
                )
                return msgspec.structs.replace(made, credential=entered.gate.chain)

            membership = Membership(node, host, MEMBERS, invite.run_id, record)  # type: ignore[arg-type]
            nursery.start_soon(membership.run)
            await membership.announce()
            await membership.read()
            yield forger
            nursery.cancel_scope.cancel()
