"""Runs and served models as a monitor finds them, without sockets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any

import msgspec

from peer.catalogue.reading import Heard, heard
from swarm.inference.record import ServerRecord
from swarm.membership.member_record import MemberRecord
from swarm.membership.proven_heads import ProvenHead
from swarm.protocol.head import Absence, Head, Learner, Member
from swarm.run.manifest import Manifest
from swarm.status.head_chain import HeadChain
from swarm.status.member_told import Told
from swarm.status.model_state import model_state
from swarm.status.reading import RunReading
from swarm.status.record_history import RecordHistory
from swarm.status.run_state import run_state
from swarm.status.state import MonitorState, Watch
from tests.swarm.membership.test_bans import record
from tests.swarm.placement.test_stages import manifest_of
from tests.swarm.run.test_served_model import served_model
from tests.swarm.support.stage_commits import begun

NOW = 1_800_000_000.0
WATCH = Watch(started_at=NOW - 600, readings=9, failed=0, last_success=NOW, reading_s=0.1)


def finite(stages: int = 1, **rules: Any) -> Manifest:
    """A run of 9 rounds whose members' votes are enough."""
    manifest = manifest_of(stages)
    run = msgspec.structs.replace(manifest.run, **{"rounds": 9, "coordinator": "witness", **rules})
    return msgspec.structs.replace(manifest, run=run)


def peer(**changes: Any) -> MemberRecord:
    return msgspec.structs.replace(record("s"), **{"at": NOW - 1, "phase": "training", **changes})


def next_head(head: Head, *, absent: Sequence[str] = (), learners: Sequence[Learner] = (), attempt: int = 0) -> Head:
    """The head of the next round, without those members' contributions."""
    away = tuple(Absence(Member(name, "s"), 1, Member("", "")) for name in absent)
    return msgspec.structs.replace(
        head, round=head.round + 1, previous=head.hash, state_hash=bytes([head.round + 1]) * 32,
        tokens=head.tokens + 1000, absent=away, learners=tuple(learners), attempt=attempt,
    )  # fmt: skip


def heads_of(manifest: Manifest, members: Sequence[str], rounds: int, stage: int = 0) -> list[Head]:
    """A term of these members and its rounds."""
    found = [manifest.first_head(stage)]
    found.append(begun(found[0], *(Member(name, "s") for name in members)))
    for _ in range(rounds):
        found.append(next_head(found[-1]))
    return found


def chain_of(heads: Sequence[Head], seen_s: float = 10.0) -> HeadChain:
    """A chain whose heads came 10 s after each other, the last one `seen_s` ago."""
    chain = HeadChain()
    for place, head in enumerate(heads):
        chain.advance(head, [], NOW - seen_s - 10 * (len(heads) - 1 - place))
    return chain


def proven(head: Head, here: Sequence[str]) -> ProvenHead:
    return ProvenHead(head, (), (), tuple(Member(name, "s") for name in here))


def shown(
    manifest: Manifest,
    records: Mapping[str, MemberRecord],
    chains: Sequence[HeadChain],
    here: Sequence[str],
    told: Told = MappingProxyType({}),
) -> MonitorState:
    """The state where the peers `here` answer from near the last head of each chain."""
    best = tuple(proven(chain.last, here) if chain.last and here else None for chain in chains)
    return run_state(RunReading(manifest, NOW, records, best), chains, told, {}, history_of(records), WATCH)


def history_of(records: Mapping[str, MemberRecord | ServerRecord]) -> RecordHistory:
    """What one reading of these records adds up to."""
    history = RecordHistory()
    history.note(records)
    return history


def told(name: str, at: float = NOW - 5, **fields: Any) -> Heard:
    found = heard(at, name, fields)
    assert found is not None, f"{name} with {fields} is no event of the catalogue"
    return found


def server(first: int, end: int, **changes: Any) -> ServerRecord:
    fields: dict[str, Any] = {
        "session": "s", "name": f"server {first}", "version": "1", "addresses": [], "joined_at": 0.0, "at": NOW - 1,
        "first": first, "end": end, **changes,
    }  # fmt: skip
    return ServerRecord(**fields)


def model_shown(records: Mapping[str, ServerRecord], told: Told = MappingProxyType({})) -> MonitorState:
    return model_state(served_model(), NOW, records, told, {}, history_of(records), WATCH)
