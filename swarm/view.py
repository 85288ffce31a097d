"""The run as an onlooker sees it: one reading of the members' records and of where they stand."""

from __future__ import annotations

import time
from pathlib import Path

import msgspec

from optim.config import Gossip
from swarm.gossip.pairing import Seen, group_round
from swarm.invite import Invite
from swarm.visit import Visitor, visit


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One peer, as it described itself `age_s` seconds ago. `in_head`: whether it is a member of the last commit,
    `speed` in inner steps a second, bytes since it started."""

    peer: str
    name: str
    role: str
    version: str
    round: int
    phase: str
    state_hash: str
    in_head: bool
    speed: float
    loss: float | None
    val_loss: float | None
    bytes_up: int
    bytes_down: int
    age_s: float


class SwarmStatus(msgspec.Struct, frozen=True, kw_only=True):
    """`round`, `state_hash` and `members` are those of the head that a majority of its members stands at; None and 0 if
    no such head was found. `quorum_alive`: whether enough of its members answered to go on. With
    `method` "gossip" there is no such head: `round` is where the middle of the members stands, `tokens` their sum."""

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


async def read_status(invite: Invite, home: Path | None = None) -> SwarmStatus:
    """Visit the run once. Raises NotAdmitted, or DialError if nobody answers."""
    async with visit(invite, home) as visitor:
        return await look(visitor)


async def look(visitor: Visitor) -> SwarmStatus:
    """One reading; takes a few seconds at most, whoever is frozen."""
    manifest = visitor.manifest
    records = await visitor.members()
    sightings = await visitor.sightings(list(records))
    best = sightings[0] if sightings and not isinstance(manifest.outer, Gossip) else None
    head = best.head if best else None
    in_head = {member.peer for member in head.members} if head else set[str]()
    now = time.time()
    peers = [
        MemberStatus(
            peer=peer,
            name=record.name,
            role=record.role,
            version=record.version,
            round=record.round,
            phase=record.phase,
            state_hash=record.state_hash.hex(),
            in_head=peer in in_head,
            speed=record.speed,
            loss=record.loss,
            val_loss=record.val_loss,
            bytes_up=record.bytes_up,
            bytes_down=record.bytes_down,
            age_s=max(0.0, round(now - record.at, 1)),
        )
        for peer, record in records.items()
    ]
    peers.sort(key=lambda status: (status.role != "full", status.name, status.peer))
    measured = [(record.round, record.val_loss) for record in records.values() if record.val_loss is not None]
    if isinstance(manifest.outer, Gossip):
        full = {peer: Seen(record.round) for peer, record in records.items() if record.role == "full"}
        middle, members, tokens = group_round(full), len(full), sum(records[peer].tokens for peer in full)
    else:
        middle, members, tokens = (head.round, len(head.members), head.tokens) if head else (None, 0, 0)
    return SwarmStatus(
        run_id=manifest.run_id,
        name=manifest.run.name,
        open=manifest.run.open,
        rounds=manifest.run.rounds,
        round=middle,
        term=head.term if head else 0,
        state_hash=head.state_hash.hex() if head else "",
        head=head.hash.hex() if head else "",
        members=members,
        quorum=head.quorum if head else 0,
        quorum_alive=bool(best and head and len(in_head.intersection(best.holders)) >= head.quorum),
        method=str(manifest.outer.__struct_config__.tag),
        tokens=tokens,
        val_loss=max(measured)[1] if measured else None,
        peers=peers,
    )
