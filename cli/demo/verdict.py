"""From what the children of a quickstart said and left on disk to its report."""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec

from cli.demo.report import (
    MoveReport,
    PeerReport,
    Report,
    StageReport,
    broken_in_pipeline,
    broken_invariants,
    ddp_bytes,
)
from cli.demo.scenario import Scenario
from cli.views.micro_batch_audit import MicroBatches, audit
from cli.views.progress import Progress

if TYPE_CHECKING:
    from swarm.protocol.head import Head
    from swarm.run.manifest import Manifest
    from swarm.training.saved_models import SavedModel

PROMPT: Final = "def "
SAMPLE_TOKENS: Final = 200


def judge(scenario: Scenario, progress: Progress, rounds: int, began: float) -> Report:
    """The report, with every invariant that did not hold named in it. `began`: Unix time."""
    from swarm.protocol.head import Head
    from swarm.training.saved_models import newest_model

    model = newest_model([scenario.children[name].home for name in scenario.survivors])
    heads = [msgspec.msgpack.decode(part.head, type=Head) for part in model.parts]
    ids = {name: _peer_id(scenario.children[name].home) for name in (*scenario.survivors, *scenario.killed)}
    losses = progress.val_losses
    parameters = sum(part.layout.numel for part in model.parts)
    ddp = ddp_bytes(parameters, heads[0].inner_step, len(scenario.survivors))
    factor = ddp / max(1, *(progress.rows[name].bytes_up for name in progress.commits))
    report = Report(
        rounds_committed=min(head.round for head in heads),
        rounds_discarded=len(progress.discarded),
        peers={ids[name]: _peer(scenario, progress, name, began) for name in ids},
        state_hash=heads[0].state_hash.hex(),
        val_loss_first=losses.get(min(losses, default=0), math.nan),
        val_loss_last=losses.get(max(losses, default=0), math.nan),
        val_losses={str(number): loss for number, loss in sorted(losses.items())},
        tokens=heads[0].tokens,
        parameters=parameters,
        inner_steps=heads[0].inner_step,
        ddp_bytes_equivalent=ddp,
        traffic_factor=round(factor, 1),
        killed=[ids[name] for name in scenario.killed],
        added=[ids[name] for name in scenario.added],
        sample=_sample(model),
        wall_s=round(time.time() - began, 1),
        broken_invariants=_broken_states(scenario, progress, model, heads),
    )
    if len(heads) > 1:
        return _judge_pipeline(report, scenario, progress, model, heads, rounds, began, ids)
    ended = _ended(scenario, progress)
    broken = broken_invariants(progress.commits, ended, rounds, scenario.killed, scenario.added, losses, factor)
    return msgspec.structs.replace(report, broken_invariants=[*broken, *report.broken_invariants])


def train_losses(progress: Progress) -> dict[int, float]:
    """Mean training loss of the peers in each round."""
    by_round: dict[int, list[float]] = {}
    for seen in progress.commits.values():
        for number, commit in seen.items():
            if commit.fields.get("loss") is not None:
                by_round.setdefault(number, []).append(float(commit.fields["loss"]))
    return {number: fmean(values) for number, values in sorted(by_round.items())}


def _judge_pipeline(
    report: Report,
    scenario: Scenario,
    progress: Progress,
    model: SavedModel,
    heads: list[Head],
    rounds: int,
    began: float,
    ids: dict[str, str],
) -> Report:
    """What is to be said of a pipeline besides."""
    unknown: list[str] = []
    books, uncounted = _books(progress, model.manifest, heads, unknown)
    faults = {"killed": scenario.killed, "frozen": scenario.frozen, "added": scenario.added}
    commits = (commit for seen in progress.commits.values() for commit in seen.values())
    broken = broken_in_pipeline(commits, _ended(scenario, progress), rounds, faults, train_losses(progress), books)
    broken += [f"{name} never took part in a commit" for name in scenario.added if not progress.commits.get(name)]
    rows = progress.rows
    return msgspec.structs.replace(
        report,
        broken_invariants=[*broken, *unknown, *report.broken_invariants],
        frozen=[ids[name] for name in scenario.frozen],
        micro_batches=books,
        stages=[
            StageReport(
                stage=stage,
                round=head.round,
                state_hash=head.state_hash.hex(),
                replicas=[ids[name] for name in scenario.survivors if rows[name].stage == stage],
                uncounted=uncounted[stage],
            )
            for stage, head in enumerate(heads)
        ],
        moves=[
            MoveReport(
                peer=ids[move.name],
                at=round(move.at - began, 3),
                source=move.source,
                target=move.target,
                reason=move.reason,
                gain=move.gain,
            )
            for move in progress.moves
        ],
    )


def _ended(scenario: Scenario, progress: Progress) -> dict[str, int]:
    """The round that each survivor stood at in the end, whether it merged it or arrived too late and adopted it."""
    return {name: progress.rows[name].round for name in scenario.survivors}


def _books(
    progress: Progress, manifest: Manifest, heads: list[Head], unknown: list[str]
) -> tuple[MicroBatches, list[int]]:
    """What was issued, and whether each stage merged it once; and how many of the first stage's each of them has not
    merged. Adds to `unknown` the stages of which that cannot be told."""
    accounts, size = progress.accounts, manifest.micro_batch
    twice, lost, undone, trained = 0, 0, 0, []
    for stage, head in enumerate(heads):
        merged = accounts.merged(stage, manifest.first_head(stage).hash.hex(), head.hash.hex())
        if merged is None:
            unknown.append(f"nobody told of all the commits of stage {stage}: what it merged is not in the books")
        else:
            elsewhere = accounts.merged_elsewhere(stage) if stage == 0 else ()
            found = audit(merged, head.ledger.cursor, head.ledger.returned, elsewhere)
            twice, lost, undone = twice + found.twice, lost + found.lost, undone + found.undone
        trained.append(head.tokens // manifest.data.seq_len)

    def total(name: str) -> int:
        return sum(totals.of(name) for totals in accounts.totals.values())

    books = MicroBatches(
        dispatched=total("dispatched"),
        completed=total("completed"),
        retried=total("retried"),
        double_counted=-(-twice // size),
        lost=-(-lost // size),
        undone=-(-undone // size),
    )
    return books, [max(0, trained[0] - samples) // size for samples in trained]


def _broken_states(scenario: Scenario, progress: Progress, model: SavedModel, heads: list[Head]) -> list[str]:
    """Whether what is on disk, and what each survivor ended with, is what was committed."""
    broken = []
    for stage, (part, head) in enumerate(zip(model.parts, heads, strict=True)):
        of = f" of stage {stage}" if len(heads) > 1 else ""
        if part.tree.root != head.state_hash:
            broken.append(f"the checkpoint{of} on disk is not the state that was committed")
        rows = [progress.rows[name] for name in scenario.survivors]
        final = {row.state_hash for row in rows if len(heads) == 1 or row.stage == stage} | {part.tree.root.hex()}
        if len(final) > 1:
            broken.append(f"the survivors{of} ended with {len(final)} different states")
    return broken


def _peer(scenario: Scenario, progress: Progress, name: str, began: float) -> PeerReport:
    child, row = scenario.children[name], progress.rows[name]
    return PeerReport(
        name=name,
        joined=round(child.since - began, 3),
        left=None if name in scenario.survivors or child.until is None else round(child.until - began, 3),
        rounds=len(progress.commits.get(name, ())),
        state_hash=row.state_hash,
        bytes_up=row.bytes_up,
        bytes_down=row.bytes_down,
        stage=row.stage,
    )


def _peer_id(home: Path) -> str:
    from peer.identity import Identity
    from swarm.run.home import Home

    return Identity.load_or_create(Home(home).identity).peer_id


def _sample(model: SavedModel) -> str:
    """What the trained model writes after "def ". On one thread: so small a model's would mostly wait for each other,
    minutes where other processes want the cores."""
    import torch

    from peer.data.tokenizer import ByteTokenizer
    from peer.model.decoder import Decoder
    from peer.model.generate import generate

    tokenizer = ByteTokenizer()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        ids = generate(
            Decoder(model.manifest.model, model.theta),
            tokenizer.encode(PROMPT),
            vocab_size=tokenizer.vocab_size,
            max_new_tokens=SAMPLE_TOKENS,
            temperature=0.7,
            seed=0,
        )
    finally:
        torch.set_num_threads(threads)
    return PROMPT + tokenizer.decode(ids)
