"""The block servers of a model or of a run's commits, as their records and events tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from peer.catalogue.reading import Heard
from peer.net.address_book import is_circuit, relay_in
from peer.plain_text import plain
from swarm.inference.coverage import block_states, server_state, troubles
from swarm.inference.record import ServedCommit, ServerRecord
from swarm.inference.route import RouteView
from swarm.status.member_told import members_told
from swarm.status.state import Link, MemberClaims, MemberFacts, MemberSeen, MemberState, MemberTold, Outcome, Watch

MEMBERS_SHOWN: Final = 256
_NO_FACTS: Final = MemberFacts(membership="none", merged=0, missed=0)
_PHASES: Final = {"held": "serving", "arriving": "loading"}


@dataclass(frozen=True)
class Collected:
    """What a monitor has collected over several readings."""

    watch: Watch
    told: Mapping[str, Sequence[Heard]] = field(default_factory=dict)
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    """What came of asking each peer for its events."""
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """Bytes a second, up and down, that each peer's last two records differ by."""
    names: Mapping[str, str] = field(default_factory=dict)
    losses: Mapping[int, Mapping[str, float]] = field(default_factory=dict)
    """The training loss that each peer's record claimed while the peer was at that round."""


def server_members(records: Mapping[str, ServerRecord], at: float, collected: Collected) -> tuple[MemberState, ...]:
    """Return the servers that are shown, by their blocks. `at`: Unix time of the records."""
    of_peers = members_told(collected.told, at)
    peers = sorted(records, key=lambda peer: (records[peer].first, records[peer].name, peer))
    return tuple(
        MemberState(
            peer=peer,
            facts=_NO_FACTS,
            seen=MemberSeen(
                answers=collected.outcomes.get(peer) == "told",
                events=collected.outcomes.get(peer, "not asked"),
                link=link_of(records[peer].addresses),
                relay=relay_of(records[peer].addresses),
            ),
            claims=_claims(records[peer], at, collected.rates.get(peer)),
            told=of_peers.get(peer, MemberTold()),
        )
        for peer in peers[:MEMBERS_SHOWN]
    )


def lacking(blocks: int, records: Mapping[str, ServerRecord], at: float) -> tuple[str, ...]:
    """Return why a new session cannot begin; empty if it can."""
    return tuple(troubles(block_states(RouteView(blocks, records, at, lambda peer: None))))


def served(blocks: int, records: Mapping[str, ServerRecord], at: float) -> tuple[int | None, tuple[str, ...]]:
    """Return the round of the commit that new answers get, the newest all of whose blocks are served, and if there is
    none why the newest takes no session. All servers of an answer have one commit."""
    wrong: tuple[str, ...] = ()
    commits: Sequence[ServedCommit | None] = sorted({c for r in records.values() for c in r.commits}, reverse=True)
    for commit in commits or [None] * bool(records):
        missing = lacking(blocks, {peer: record for peer, record in records.items() if record.has(commit)}, at)
        if commit is not None and not missing:
            return commit.round, ()
        wrong = wrong or missing
    return None, wrong


def link_of(addresses: Sequence[str]) -> Link:
    """Return how a peer says that it can be reached."""
    if not addresses:
        return "unknown"
    return "relay" if all(is_circuit(address) for address in addresses) else "direct"


def relay_of(addresses: Sequence[str]) -> str:
    """Return the peer id of the relay over which all these addresses lead; empty if they do not."""
    relays = {relay_in(address) for address in addresses}
    return relays.pop() if len(relays) == 1 else ""


def _claims(record: ServerRecord, at: float, rate: tuple[float, float] | None) -> MemberClaims:
    state = server_state(record, at)
    return MemberClaims(
        name=plain(record.name, 64),
        role="server",
        version=plain(record.version, 64),
        phase=_PHASES.get(state, state),
        age_s=round(at - record.at, 1),
        ready_in_s=max(0.0, round(record.ready_at - at, 1)),
        bytes_up=record.bytes_up,
        bytes_down=record.bytes_down,
        up_bytes_s=rate[0] if rate else None,
        down_bytes_s=rate[1] if rate else None,
        first=record.first,
        end=record.end,
        sessions=record.sessions,
        kv_used=1 - min(1.0, record.pages_free / record.pages) if record.pages else None,
        step_ms=record.step_ms or None,
        waiting_tokens=record.waiting_tokens,
        tokens=record.tokens,
        uplink_bytes_s=record.uplink_bytes_s,
        wire=tuple(record.wire),
        pinned=record.pinned,
        commits=tuple(commit.round for commit in record.commits),
    )
