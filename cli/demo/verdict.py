"""The report of a quickstart, from its children's events and the checkpoints they left on disk."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import msgspec

from cli.demo.report import Report, StageReport, broken_in_pipeline, broken_in_whole, broken_invariants, ddp_bytes
from cli.demo.scenario import Scenario
from cli.progress.losses import finite
from cli.progress.micro_batch_audit import MicroBatches, audit
from cli.progress.state import ViewState
from peer.figures import several
from swarm.protocol.ledger import count, without

if TYPE_CHECKING:
    from swarm.protocol.head import Head
    from swarm.run.manifest import Manifest
    from swarm.training.saved_models import SavedModel


@dataclass(frozen=True)
class _Outcome:
    """Everything that a quickstart is judged by."""

    scenario: Scenario
    view: ViewState
    model: SavedModel
    heads: list[Head]
    """The last head of each stage; one if there is no pipeline."""
    ids: dict[str, str]
    """Peer ids by child name, of the surviving and the killed peers."""
    rounds: int
    """Number of rounds the run was to have."""
    began: float
    """Unix time."""


def judge(scenario: Scenario, view: ViewState, rounds: int, began: float) -> Report:
    """Return the report, which names every invariant that did not hold. `began` is a Unix time."""
    from swarm.protocol.head import Head
    from swarm.training.saved_models import newest_model

    model = newest_model([scenario.children[name].home for name in scenario.survivors])
    heads = [msgspec.msgpack.decode(part.head, type=Head) for part in model.parts]
    ids = {name: _peer_id(scenario.children[name].home) for name in (*scenario.survivors, *scenario.killed)}
    outcome = _Outcome(scenario, view, model, heads, ids, rounds, began)
    report = _common_report(outcome)
    if len(heads) > 1:
        return _judge_pipeline(outcome, report)
    broken = broken_in_whole(view.val_losses, rounds, _traffic_factor(outcome))
    return msgspec.structs.replace(report, broken_invariants=[*report.broken_invariants, *broken])


def train_losses(view: ViewState) -> dict[int, float]:
    """Return the mean training loss of the peers by round."""
    by_round: dict[int, list[float]] = {}
    for seen in view.commits.values():
        for number, commit in seen.items():
            if (loss := finite(commit.loss)) is not None:
                by_round.setdefault(number, []).append(loss)
    return {number: fmean(values) for number, values in sorted(by_round.items())}


def _judge_pipeline(outcome: _Outcome, report: Report) -> Report:
    scenario, view, ids = outcome.scenario, outcome.view, outcome.ids
    unknown, manifest = list[str](), outcome.model.manifest
    micro_batches, uncounted = _audit_micro_batches(view, manifest, outcome.heads, unknown)
    broken = broken_in_pipeline(train_losses(view), outcome.rounds, micro_batches)
    return msgspec.structs.replace(
        report,
        broken_invariants=[*report.broken_invariants, *broken, *unknown],
        frozen=[ids[name] for name in scenario.frozen],
        micro_batches=micro_batches,
        stages=[
            StageReport(
                stage=stage,
                round=head.round,
                state_hash=head.state_hash.hex(),
                replicas=[ids[name] for name in scenario.survivors if view.peers[name].claims.stage == stage],
                merged=head.tokens // manifest.data.seq_len // manifest.micro_batch,
                lost=-(-head.ledger.lost // manifest.micro_batch),
                uncounted=uncounted[stage],
            )
            for stage, head in enumerate(outcome.heads)
        ],
        moves=[
            {
                "peer": ids[name],
                "at": round(at - outcome.began, 3),
                "source": move.source,
                "target": move.target,
                "reason": move.reason,
                "gain": move.gain,
            }
            for name, at, move in view.moves
        ],
    )


def _common_report(outcome: _Outcome) -> Report:
    """Return the part of the report that every run has, with the invariants that are the same in each."""
    scenario, view, heads, ids = outcome.scenario, outcome.view, outcome.heads, outcome.ids
    losses = view.val_losses
    faults = {"killed": scenario.killed, "added": scenario.added}
    faults |= {"frozen": scenario.frozen} if len(heads) > 1 else {}
    ended = {name: view.peers[name].round for name in scenario.survivors}  # merged by the peer, or adopted
    return Report(
        rounds_committed=min(head.round for head in heads),
        rounds_discarded=len(view.discarded),
        peers={ids[name]: _peer(outcome, name) for name in ids},
        state_hash=heads[0].state_hash.hex(),
        val_loss_first=losses.get(min(losses, default=0), math.nan),
        val_loss_last=losses.get(max(losses, default=0), math.nan),
        val_losses={str(number): loss for number, loss in sorted(losses.items())},
        tokens=heads[0].tokens,
        parameters=_parameters(outcome),
        inner_steps=heads[0].inner_step,
        ddp_bytes_equivalent=_ddp_bytes(outcome),
        traffic_factor=round(_traffic_factor(outcome), 1),
        killed=[ids[name] for name in scenario.killed],
        added=[ids[name] for name in scenario.added],
        sample="",
        wall_s=round(time.time() - outcome.began, 1),
        broken_invariants=[
            *broken_invariants(view.commits, ended, outcome.rounds, faults),
            *_broken_states(outcome),
        ],
    )


def _parameters(outcome: _Outcome) -> int:
    return sum(part.layout.numel for part in outcome.model.parts)


def _ddp_bytes(outcome: _Outcome) -> int:
    return ddp_bytes(_parameters(outcome), outcome.heads[0].inner_step, len(outcome.scenario.survivors))


def _traffic_factor(outcome: _Outcome) -> float:
    """Return how many times less the busiest peer sent than in an fp32 all-reduce after every inner step."""
    view = outcome.view
    return _ddp_bytes(outcome) / max(1, *(view.peers[name].claims.bytes_up for name in view.commits))


def _audit_micro_batches(
    view: ViewState, manifest: Manifest, heads: list[Head], unknown: list[str]
) -> tuple[MicroBatches, list[int]]:
    """Audit every stage. Return the micro-batch counts, and for each stage those that only the first stage has merged
    and no ledger lists.

    Adds a sentence to `unknown` for each stage whose commits are not all known, or whose ledger does not add up.
    """
    trail, size, seq_len = view.audit_trail, manifest.micro_batch, manifest.data.seq_len
    twice, lost, undone, uncounted = 0, 0, 0, []
    for stage, head in enumerate(heads):
        merged = trail.merged(stage, manifest.first_head(stage).hash.hex(), head.hash.hex())
        if merged is None:
            unknown.append(f"no peer reported all commits of stage {stage}, so its micro-batches were not audited")
        else:
            elsewhere = trail.merged_elsewhere(stage) if stage == 0 else ()
            found = audit(merged, head.ledger, elsewhere)
            twice, lost, undone = twice + found.twice, lost + found.lost, undone + found.undone
        ledger = head.ledger
        if ledger.cursor != head.tokens // seq_len + count(ledger.returned) + ledger.lost:
            unknown.append(f"in the ledger of stage {stage} the samples merged, free and lost are not those issued")
        uncounted.append(count(without(heads[0].ledger.settled, ledger.settled)) // size)
        if uncounted[-1]:
            unknown.append(
                f"stage {stage} has neither merged nor declared lost {several(uncounted[-1], 'micro-batch')}"
            )

    def total(name: str) -> int:
        return sum(totals.of(name) for totals in trail.totals.values())

    micro_batches = MicroBatches(
        dispatched=total("dispatched"),
        completed=total("completed"),
        retried=total("retried"),
        double_counted=-(-twice // size),
        lost=-(-lost // size),
        undone=-(-undone // size),
    )
    return micro_batches, uncounted


def _broken_states(outcome: _Outcome) -> list[str]:
    """Check that the checkpoints on disk, and the final state of each surviving peer, are what was committed."""
    broken, heads = list[str](), outcome.heads
    for stage, (part, head) in enumerate(zip(outcome.model.parts, heads, strict=True)):
        of = f" of stage {stage}" if len(heads) > 1 else ""
        if part.tree.root != head.state_hash:
            broken.append(f"the checkpoint{of} on disk is not the state that was committed")
        said = [outcome.view.peers[name].claims for name in outcome.scenario.survivors]
        final = {of.state_hash for of in said if len(heads) == 1 or of.stage == stage} | {part.tree.root.hex()}
        if len(final) > 1:
            broken.append(f"the surviving peers{of} ended with {len(final)} different states")
    return broken


def _peer(outcome: _Outcome, name: str) -> dict[str, Any]:
    child, says, began = outcome.scenario.children[name], outcome.view.peers[name].claims, outcome.began
    return {
        "name": name,
        "joined": round(child.since - began, 3),
        "left": None if name in outcome.scenario.survivors or child.until is None else round(child.until - began, 3),
        "rounds": len(outcome.view.commits.get(name, ())),
        **{field: getattr(says, field) for field in ("state_hash", "bytes_up", "bytes_down", "stage")},
    }


def _peer_id(home: Path) -> str:
    from peer.identity import Identity
    from swarm.run.home import Home

    return Identity.load_or_create(Home(home).identity).peer_id
