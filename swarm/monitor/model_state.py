"""The state of a served model, from its servers' records. Pure. Only the manifest is a fact: there are no heads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from msgspec.structs import replace

from peer.plain_text import plain
from swarm.inference.record import ServerRecord
from swarm.membership.told_events import ToldEvent
from swarm.monitor.event_words import log_lines
from swarm.monitor.member_events import Outcome
from swarm.monitor.servers import MEMBERS_SHOWN, lacking, server_members
from swarm.monitor.state import BlockRow, MonitorState, Verdict, Watch
from swarm.run.manifest import ServedModelManifest


@dataclass(frozen=True)
class ModelView:
    """All that the state of a served model is made of."""

    manifest: ServedModelManifest
    at: float
    records: Mapping[str, ServerRecord]
    watch: Watch
    told: Mapping[str, Sequence[ToldEvent]] = field(default_factory=dict)
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)
    rates: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)


def model_state(view: ModelView) -> MonitorState:
    """Return the state."""
    manifest = view.manifest
    blocks = tuple(_blocks(view))
    left_out = max(0, len(view.records) - MEMBERS_SHOWN)
    return MonitorState(
        kind="model",
        at=view.at,
        run_id=manifest.run_id,
        name=plain(manifest.name, 64),
        open=manifest.open,
        blocks_total=manifest.model.layers,
        dtype=manifest.dtype,
        parts=len(manifest.cuts),
        verdict=model_verdict(view, blocks),
        blocks=blocks,
        troubles=lacking(manifest.model.layers, view.records, view.at),
        members=server_members(view.records, view.at, view.told, view.outcomes, view.rates),
        log=log_lines(view.told, view.names),
        names={peer: plain(name, 64) for peer, name in view.names.items()},
        monitor=replace(view.watch, members_left_out=left_out, history_complete=True),
    )


def model_verdict(view: ModelView, blocks: Sequence[BlockRow]) -> Verdict:
    """Return the verdict on a served model."""
    if not view.records:
        return Verdict(
            level="bad",
            word="everybody away",
            reason="no server of this model publishes a record",
            remedy="start servers with `peer serve INVITE`, at least one for each block",
            basis=("seen",),
        )
    missing = [row for row in blocks if not row.servers]
    if missing:
        row = missing[0]
        where = f"blocks {row.first} to {row.end - 1}" + (" and others" if missing[1:] else "")
        if all(one.arriving for one in missing):
            return Verdict(
                level="waiting",
                word="waiting",
                reason=f"{where} have no server yet, and {row.arriving} about to be ready",
                remedy="wait until the weights are loaded",
                basis=("claims",),
            )
        return Verdict(
            level="bad",
            word="stopped",
            reason=f"{where} have no server, so no text can be generated",
            remedy=f"start one with `peer serve INVITE --blocks {row.first}:{row.end}`",
            basis=("claims",),
        )
    weakest = min(blocks, key=lambda row: row.servers)
    if weakest.servers == 1:
        return Verdict(
            level="edge",
            word="healthy, at the edge",
            reason=f"every block is served, but blocks {weakest.first} to {weakest.end - 1} by one server only",
            remedy=f"start another one with `peer serve INVITE --blocks {weakest.first}:{weakest.end}`",
            basis=("claims",),
        )
    return Verdict(
        level="good",
        word="healthy",
        reason=f"every block is served, by {weakest.servers} servers or more",
        basis=("claims",),
    )


def _blocks(view: ModelView) -> list[BlockRow]:
    """Return the blocks in order, those with the same servers as one row."""
    total = view.manifest.model.layers
    inside = {peer: record for peer, record in view.records.items() if record.first < total}
    borders = {0, total, *(r.first for r in inside.values()), *(min(r.end, total) for r in inside.values())}
    edges, rows = sorted(borders), []
    for first, end in pairwise(edges):
        there = {peer: record for peer, record in inside.items() if record.first <= first and end <= record.end}
        ready = {peer: record for peer, record in there.items() if record.serves(view.at)}
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
