"""Homes of a run whose peers are gone, made without processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from peer.events import EventLog
from peer.identity import Identity
from swarm.protocol.agreement.messages import ChainLink
from swarm.protocol.agreement.records import LINK_KEY, LinkRecord
from swarm.protocol.head import Head, Member
from swarm.rounds.records import RecordFiles
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import AnyManifest, Manifest, sign_manifest
from swarm.run.manifest_transfer import save_run_files
from tests.swarm.placement.test_stages import manifest_of
from tests.swarm.run.test_gate import AUTHORITY, invite_to
from tests.swarm.support.stage_commits import begun, started

ANN, BOB = "ann" * 8, "bob" * 8


def ended_run(name: str = "a run", rounds: int = 3) -> Manifest:
    manifest = msgspec.structs.replace(manifest_of(1), authority=AUTHORITY.peer_id)
    run = msgspec.structs.replace(manifest.run, name=name, rounds=rounds, open=False, coordinator="witness")
    return msgspec.structs.replace(manifest, run=run)


def last_head(manifest: Manifest, number: int = 3) -> Head:
    first = begun(manifest.first_head(0), Member(ANN, "s"), Member(BOB, "s"))
    return msgspec.structs.replace(
        first, round=number, state_hash=bytes([7]) * 32, previous=first.hash, tokens=2_500_000
    )


def home_of(path: Path, manifest: AnyManifest) -> tuple[Path, Invite]:
    """A home that has entered the run, and the invite in it, at whose address no peer listens."""
    path.mkdir()
    invite = invite_to(manifest)
    Home(path).invite.write_text(str(invite))
    Identity.load_or_create(Home(path).identity)
    save_run_files(path, sign_manifest(AUTHORITY, manifest), b"")
    return path, invite


def home_of_a_member(path: Path, manifest: Manifest, name: str = "ann", **link: Any) -> tuple[Path, Invite]:
    """As `home_of`, of a peer that has trained three rounds: with its log, and the last head with its proof, or another
    link of it."""
    home, invite = home_of(path, manifest)
    head = last_head(manifest)
    proof = ChainLink(head, **link) if link else started(AUTHORITY, head).links[0]
    record = msgspec.msgpack.encode(LinkRecord(3, proof, True))
    RecordFiles(Home(home).agreement).write({f"{LINK_KEY}0": record})
    log = EventLog(Home(home).events)
    log.emit("run_entered", name=manifest.run.name, role="full", rounds=3, stages=1, tokenizer="bytes")
    log.emit("member_joined", peer=ANN, name=name, role="full")
    log.emit("val_evaluated", round=0, loss=5.5)
    for number in range(1, 4):
        log.emit("round_committed", round=number, loss=5.0 - number, members=2)
        if number == 2:
            log.emit("val_evaluated", round=2, loss=3.25)
    log.emit("run_completed", round=3)
    log.close()
    return home, invite
