"""The block servers of a model or of a run's commits, as their records and events tell. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from peer.net.address_book import is_circuit, relay_in
from peer.plain_text import plain
from swarm.inference.coverage import block_states, server_state, troubles
from swarm.inference.record import ServedCommit, ServerRecord
from swarm.inference.route import RouteView
from swarm.status.member_told import Told, members_told
from swarm.status.record_history import Rate
from swarm.status.state import Link, MemberClaims, MemberFacts, MemberSeen, MemberState, MemberTold, Outcome

MEMBERS_SHOWN: Final = 256
NO_FACTS: Final = MemberFacts(membership="none", merged=0, missed=0)
_PHASES: Final = {"held": "serving", "arriving": "loading"}


def server_members(
    records: Mapping[str, ServerRecord],
    at: float,
    told: Told,
    outcomes: Mapping[str, Outcome],
    rates: Mapping[str, Rate],
) -> tuple[MemberState, ...]:
    """Return the servers that are shown, by their blocks. `at`: Unix time of the records."""
    of_peers = members_told(told, at)
    peers = sorted(records, key=lambda peer: (records[peer].first, records[peer].name, peer))
    return tuple(
        MemberState(
            peer=peer,
            facts=NO_FACTS,
            seen=met_with(outcomes.get(peer) == "told", outcomes.get(peer), records[peer].addresses),
            claims=_claims(records[peer], at, rates.get(peer)),
            told=of_peers.get(peer, MemberTold()),
        )
        for peer in peers[:MEMBERS_SHOWN]
    )


def met_with(answers: bool, outcome: Outcome | None, addresses: Sequence[str]) -> MemberSeen:
    """Return what the monitor met with at a peer. `outcome`: of asking for its events; None where it was not asked."""
    relays = {relay_in(address) for address in addresses}
    relay = relays.pop() if len(relays) == 1 else ""
    return MemberSeen(answers=answers, events=outcome or "not asked", link=_link_of(addresses), relay=relay)


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


def _link_of(addresses: Sequence[str]) -> Link:
    """Return how a peer says that it can be reached."""
    if not addresses:
        return "unknown"
    return "relay" if all(is_circuit(address) for address in addresses) else "direct"


def _claims(record: ServerRecord, at: float, rate: Rate | None) -> MemberClaims:
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
