"""The state of a served model, from its servers' records. Pure. Only the manifest is a fact: there are no heads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Final

from msgspec.structs import replace

from peer.plain_text import plain
from swarm.inference.record import ServerRecord
from swarm.run.manifest import ServedModelManifest
from swarm.status.event_words import log_lines, names_told
from swarm.status.member_told import Told
from swarm.status.record_history import RecordHistory
from swarm.status.servers import MEMBERS_SHOWN, lacking, server_members
from swarm.status.state import BlockRow, MonitorState, Outcome, Severity, Verdict, Watch
from swarm.status.verdict import AWAY_S, EDGE, UNREAD, Condition, gravest

FULL: Final = 0.95
"""The share of its room that a server which counts as full has taken."""


def model_state(
    manifest: ServedModelManifest,
    at: float,
    records: Mapping[str, ServerRecord],
    told: Told,
    outcomes: Mapping[str, Outcome],
    history: RecordHistory,
    watch: Watch,
) -> MonitorState:
    """Return the state. `at`: Unix time of the records; `outcomes`: of asking each peer for its events."""
    layers, names = manifest.model.layers, names_told(told) | history.names
    left_out = max(0, len(records) - MEMBERS_SHOWN)
    state = MonitorState(
        kind="model",
        at=at,
        run_id=manifest.run_id,
        name=plain(manifest.name, 64),
        open=manifest.open,
        blocks_total=layers,
        dtype=manifest.quantization or manifest.dtype,
        parts=len(manifest.cuts),
        verdict=UNREAD,
        blocks=tuple(_blocks(layers, records, at)),
        troubles=lacking(layers, records, at),
        members=server_members(records, at, told, outcomes, history.rates),
        log=log_lines(told, names),
        names={peer: plain(name, 64) for peer, name in names.items()},
        monitor=replace(watch, members_left_out=left_out, history_complete=True),
    )
    return replace(state, verdict=model_verdict(state))


def model_verdict(state: MonitorState) -> Verdict:
    """Return the verdict on a served model, whose `state` has none yet."""
    if not state.members:
        return Verdict(
            level="bad",
            word="everybody away",
            reason="no server of this model publishes a record",
            remedy="start servers with `peer serve INVITE`, at least one for each block",
            basis=("seen",),
        )
    missing = [row for row in state.blocks if not row.servers]
    if missing and all(row.arriving for row in missing):
        row = missing[0]
        return Verdict(
            level="waiting",
            word="waiting",
            reason=f"blocks {row.first} to {row.end - 1} have no server yet, and {row.arriving} about to be ready",
            remedy="wait until the weights are loaded",
            basis=("claims",),
        )
    least = min(row.servers for row in state.blocks)
    return gravest([one for one in blocks_served(state) if one.word]) or Verdict(
        level="good",
        word="healthy",
        reason=f"every block is served, by {least} servers or more",
        basis=("claims",),
    )


def blocks_served(state: MonitorState) -> Iterator[Condition]:
    """Find the blocks without a server, with one, or whose servers are full."""
    used = {m.peer: m.claims.kv_used or 0.0 for m in state.members if m.claims is not None}
    for row in state.blocks:
        blocks, where = f"blocks {row.first} to {row.end - 1}", f"{row.first}:{row.end}"
        found: tuple[str, Severity, str, float] | None = None
        if row.servers == 0 and not row.arriving:
            found = ("blocks_lost", "critical", f"{blocks} have no server, so no text can be generated", 0.0)
        elif row.servers and all(used.get(peer, 0.0) >= FULL for peer in row.peers):
            found = ("servers_full", "warning", f"all servers of {blocks} are full", 60.0)
        elif row.servers == 1:
            found = ("single_server", "warning", f"{blocks} have one server only", AWAY_S)
        if found is not None:
            name, severity, text, after_s = found
            yield Condition(
                name=name,
                subject=where,
                severity=severity,
                text=text,
                remedy=f"start one{' more' * bool(row.servers)} with `peer serve INVITE --blocks {where}`",
                basis=("claims",),
                after_s=after_s,
                word="stopped" if not row.servers else EDGE if row.servers == 1 else "",
                level="bad" if not row.servers else "edge",
            )


def _blocks(total: int, records: Mapping[str, ServerRecord], at: float) -> list[BlockRow]:
    """Return the blocks in order, those with the same servers as one row."""
    inside = {peer: record for peer, record in records.items() if record.first < total}
    borders = {0, total, *(r.first for r in inside.values()), *(min(r.end, total) for r in inside.values())}
    edges, rows = sorted(borders), []
    for first, end in pairwise(edges):
        there = {peer: record for peer, record in inside.items() if record.first <= first and end <= record.end}
        ready = {peer: record for peer, record in there.items() if record.serves(at)}
        leaving = sum(record.leaving for record in ready.values())
        rows.append(
            BlockRow(
                first=first,
                end=end,
                servers=len(ready) - leaving,
                arriving=len(there) - len(ready),
                leaving=leaving,
                peers=tuple(sorted(there)[:MEMBERS_SHOWN]),
            )
        )
    return rows
