"""The run as an onlooker sees it: one reading of the members' records and of where they stand."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Final

import msgspec

from optim.config import GossipConfig
from swarm.client.session import RunClient, open_client
from swarm.gossip.pairing import PeerView, group_round
from swarm.membership.member_record import MemberRecord
from swarm.protocol.head import Head
from swarm.protocol.messages import NO_MAJORITY
from swarm.protocol.quorum import HeadCandidate
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest

_ROLES: Final = ("full", "stage", "feeder", "coordinator")


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One peer, as it described itself `age_s` seconds ago. `round`: None where it has no state (yet), as feeders.
    `in_head`: whether it is a member of the last commit (its stage's), `speed` in inner steps a second, bytes since it
    started.

    In a pipeline: `stage` where it is, or where it is on its way to and expects to be at work in `ready_in_s` seconds,
    coming from the stage `source` (-1: no stage); `queue` micro-batches wait for it, one takes it `service_s` of work,
    `rate` a second were counted there lately."""

    peer: str
    name: str
    role: str
    version: str
    round: int | None
    phase: str
    state_hash: str
    in_head: bool
    speed: float
    loss: float | None
    val_loss: float | None
    bytes_up: int
    bytes_down: int
    age_s: float
    stage: int
    source: int
    queue: float
    service_s: float
    rate: float
    ready_in_s: float


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a pipeline: blocks `first` to before `end`. The head is that of its group (None and 0: none found).
    `replicas` are at work there, `arriving` on their way. `queue`: micro-batches that wait at a replica, `service_s`:
    seconds that one takes it, means over the replicas that have measured them (None: nobody has); `rate`: how many a
    second all of them together have counted lately. `phase`: what most of them do, or why nothing goes on."""

    stage: int
    first: int
    end: int
    round: int | None
    term: int
    state_hash: str
    head: str
    members: int
    quorum: int
    quorum_alive: bool
    tokens: int
    replicas: int
    arriving: int
    queue: float | None
    service_s: float | None
    rate: float
    phase: str


class SwarmStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`round`, `state_hash` and `members` are those of the head that a majority of its members stands at; None and 0 if
    no such head was found. `quorum_alive`: whether enough of its members answered to go on. With
    `method` "gossip" there is no such head: `round` is where the middle of the members stands, `tokens` their sum.

    A pipeline has a head for each of its `stages` (empty otherwise): `round` and `tokens` are then those that all
    stages have reached, `members` those of all of them, and there is no common hash."""

    run_id: str
    name: str
    open: bool
    rounds: int
    round: int | None
    term: int
    state_hash: str
    head: str
    members: int
    quorum: int
    quorum_alive: bool
    method: str
    tokens: int
    val_loss: float | None
    peers: list[MemberStatus]
    stages: list[StageStatus]


async def read_status(invite: Invite, home: Path | None = None) -> SwarmStatus:
    """Visit the run once. Raises NotAdmitted, or DialError if nobody answers."""
    async with open_client(invite, home) as client:
        return await look(client)


async def look(client: RunClient) -> SwarmStatus:
    """One reading; takes a few seconds at most, whoever is frozen."""
    manifest = client.manifest
    records = await client.members()
    found = await client.all_candidates(records)
    best = [None if isinstance(manifest.outer, GossipConfig) or not seen else seen[0] for seen in found]
    return picture(manifest, records, best, time.time())


def picture(
    manifest: Manifest, records: Mapping[str, MemberRecord], best: Sequence[HeadCandidate | None], now: float
) -> SwarmStatus:
    """The run as `records` and each stage's `best` sighting show it at `now`, Unix time."""
    members_of = [{member.peer for member in candidate.head.members} if candidate else set() for candidate in best]

    def in_head(peer: str, record: MemberRecord) -> bool:
        stage = 0 if manifest.stages == 1 else record.stage
        return 0 <= stage < manifest.stages and peer in members_of[stage]

    peers = [_member(peer, record, in_head(peer, record), now) for peer, record in records.items()]
    peers.sort(key=lambda status: (_ROLES.index(status.role), status.stage, status.name, status.peer))
    # Of those that are furthest the lowest: who measured long ago still says so.
    measured = [(record.round, -record.val_loss) for record in records.values() if record.val_loss is not None]
    told = records.get(manifest.authority)
    stages = [_stage(manifest, stage, records.values(), candidate, told, now) for stage, candidate in enumerate(best)]
    heads = [candidate.head for candidate in best if candidate]
    head: Head | None = heads[0] if manifest.stages == 1 and heads else None
    rounds = [stage.round for stage in stages if stage.round is not None]
    round_ = min(rounds) if len(rounds) == len(stages) else None
    members, tokens = sum(stage.members for stage in stages), min(stage.tokens for stage in stages)
    if isinstance(manifest.outer, GossipConfig):
        full = {peer: PeerView(record.round) for peer, record in records.items() if record.role == "full"}
        round_, members, tokens = group_round(full), len(full), sum(records[peer].tokens for peer in full)
    return SwarmStatus(
        run_id=manifest.run_id,
        name=manifest.run.name,
        open=manifest.run.open,
        rounds=manifest.run.rounds,
        round=round_,
        term=max(stage.term for stage in stages),
        state_hash=head.state_hash.hex() if head else "",
        head=head.hash.hex() if head else "",
        members=members,
        quorum=head.quorum if head else 0,
        quorum_alive=all(stage.quorum_alive for stage in stages),
        method=str(manifest.outer.__struct_config__.tag),
        tokens=tokens,
        val_loss=-max(measured)[1] if measured else None,
        peers=peers,
        stages=stages if manifest.stages > 1 else [],
    )


def _member(peer: str, record: MemberRecord, in_head: bool, now: float) -> MemberStatus:
    return MemberStatus(
        peer=peer,
        name=record.name,
        role=record.role,
        version=record.version,
        round=record.round if record.round >= 0 else None,
        phase=record.phase,
        state_hash=record.state_hash.hex(),
        in_head=in_head,
        speed=record.speed,
        loss=record.loss,
        val_loss=record.val_loss,
        bytes_up=record.bytes_up,
        bytes_down=record.bytes_down,
        age_s=max(0.0, round(now - record.at, 1)),
        stage=record.stage,
        source=record.source,
        queue=record.queue,
        service_s=record.service_s,
        rate=record.rate,
        ready_in_s=round(record.ready_at - now, 1) if record.moving(now) else 0.0,
    )


def _stage(
    manifest: Manifest,
    stage: int,
    records: Iterable[MemberRecord],
    best: HeadCandidate | None,
    told: MemberRecord | None,
    now: float,
) -> StageStatus:
    """`told`: the authority's record, which has the last round that all stages have committed. Asked for a stage of
    which nobody is there, it answers with the head that it began the term with."""
    first, end = manifest.cuts[stage]
    head = best.head if best else None
    there = [record for record in records if record.stage == stage]
    at_work = [record for record in there if not record.moving(now)]
    measured = [record for record in at_work if record.service_s > 0]
    members = {member.peer for member in head.members} if head else set[str]()
    alive = bool(best and head and len(members.intersection(best.holders)) >= head.quorum)
    at_least = told if told is not None and not at_work else None
    return StageStatus(
        stage=stage,
        first=first,
        end=end,
        round=max(head.round, at_least.round if at_least else 0) if head else None,
        term=head.term if head else 0,
        state_hash=head.state_hash.hex() if head else "",
        head=head.hash.hex() if head else "",
        members=len(members),
        quorum=head.quorum if head else 0,
        quorum_alive=alive,
        tokens=max(head.tokens, at_least.tokens if at_least else 0) if head else 0,
        replicas=len(at_work),
        arriving=len(there) - len(at_work),
        queue=fmean(record.queue for record in measured) if measured else None,
        service_s=fmean(record.service_s for record in measured) if measured else None,
        rate=sum(record.rate for record in at_work),
        phase=_phase(at_work, there, alive or head is None, now),
    )


def _phase(at_work: Sequence[MemberRecord], there: Sequence[MemberRecord], alive: bool, now: float) -> str:
    """What most of those that are `at_work` do; or why nothing goes on there."""
    if at_work:
        usual = Counter(record.phase for record in at_work).most_common(1)[0][0]
        return usual if alive else NO_MAJORITY
    soonest_s = min((record.ready_at - now for record in there), default=None)
    return "not served" if soonest_s is None else f"ready in {soonest_s:.0f} s"
