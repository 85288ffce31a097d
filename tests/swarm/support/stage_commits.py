"""Machines of a run that hold and fetch commits of a stage, and such commits."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from peer.checkpoint.hash_tree import hash_state
from peer.events import Event, EventLog
from peer.identity import Identity, sign_body
from peer.net.host import Host, open_host
from peer.net.method import Call
from swarm.membership.member_record import MemberRecord, member_record
from swarm.membership.proven_heads import ProvenHead
from swarm.placement.stages import layout_of, vectors_of
from swarm.protocol.agreement.messages import ChainLink, StartBody
from swarm.protocol.agreement.rules.evidence import START
from swarm.protocol.head import Head, Member
from swarm.protocol.messages import HEAD_REPORT, AskHead, HeadReport
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest
from swarm.run.owners_pause import OwnersPause
from swarm.run.peer_context import JoinConfig, PeerContext
from swarm.state.fetch import Fetched

STAGE = 1
Commit = tuple[ProvenHead, Fetched]
"""A head of that stage with its proof, and the state."""


@asynccontextmanager
async def context_of(manifest: Manifest, home: Path) -> AsyncIterator[tuple[PeerContext, list[Event]]]:
    """A machine of the run, with only what a backup needs."""
    log, seen = EventLog(), list[Event]()
    with log.subscribed(seen.append):
        async with open_host(identity=Identity.generate(), events=log) as host:
            config = JoinConfig(home, Invite(manifest.run_id, manifest.authority, ()))
            home.mkdir()
            pause = OwnersPause(log, home / "paused")
            yield PeerContext(host, Home(home), manifest, config, cast(Any, None), cast(Any, None), pause), seen


def record_of(host: Host, head: Head, stage: int) -> MemberRecord:
    record = member_record(host, head, session="s", name="n", role="stage", phase="", joined_at=0.0)
    return msgspec.structs.replace(record, stage=stage, since=time.time())


def begun(head: Head, *members: Member, term: int = 1) -> Head:
    """Return the first head of a term, over the state of `head`."""
    return msgspec.structs.replace(head, term=term, previous=head.hash, members=tuple(sorted(members)))


def started(authority: Identity, head: Head) -> ProvenHead:
    """Prove a head of a pipeline by what the authority has signed: it begins a term there."""
    return ProvenHead(head, (ChainLink(head, start=sign_body(authority, START, StartBody(head))),))


def commit_of(manifest: Manifest, authority: Identity, round: int, stage: int = STAGE, term: int = 1) -> Commit:
    numel = layout_of(manifest, stage).numel
    tensors = tuple(torch.full((numel,), float(round + n)) for n in range(len(vectors_of(manifest, stage))))
    tree = hash_state(tensors)
    first = begun(manifest.first_head(stage), Member("gone", "s"), term=term)
    head = msgspec.structs.replace(first, round=round, state_hash=tree.root, previous=first.hash)
    return started(authority, head), Fetched(tensors, tree, {}, 0, 0.0)


def serve_head_report(host: Host, report: HeadReport) -> None:
    """Let a host report that head."""

    async def answer(call: Call[AskHead]) -> HeadReport:
        return report

    host.rpc.register(HEAD_REPORT, answer)
