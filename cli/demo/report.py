"""The results of a quickstart: report.json and the invariants that must have held."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

from cli.progress.micro_batch_audit import MicroBatches
from peer.catalogue.rounds import RoundCommitted
from peer.errors import ResourceError
from peer.figures import number_text, several

TRAFFIC_FACTOR_MIN: Final = 50.0


class StageReport(msgspec.Struct, frozen=True, kw_only=True):
    """The end of one stage of a pipeline."""

    stage: int
    round: int
    state_hash: str
    replicas: list[str]
    """Peer ids."""
    merged: int
    """Micro-batches in this stage's commits."""
    lost: int
    """Micro-batches that this stage's ledger declares lost."""
    uncounted: int
    """Micro-batches that the first stage has merged, and this one has neither merged nor declared lost."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """report.json. Losses are in nats per byte on held-out text."""

    rounds_committed: int
    """In a pipeline: by every stage."""
    rounds_discarded: int
    peers: dict[str, dict[str, Any]]
    """By id: `name`, the rounds it committed, and as it said last `state_hash`, `stage`, and in `bytes_up` and
    `bytes_down` what its sockets carried, state transfer included. `joined` and `left` are seconds since the quickstart
    began; `left` is None if the peer stayed to the end."""
    state_hash: str
    """In a pipeline: of the first stage."""
    val_loss_first: float
    val_loss_last: float
    """Null, as `val_loss_first`, where it was not measured or was NaN or infinite."""
    val_losses: dict[str, float]
    tokens: int
    parameters: int
    inner_steps: int
    ddp_bytes_equivalent: int
    """Bytes that each peer would have sent in an fp32 ring all-reduce of the gradients after every inner step."""
    traffic_factor: float
    killed: list[str]
    added: list[str]
    sample: str
    """The trained model's answer through block servers; empty if an invariant did not hold."""
    wall_s: float
    broken_invariants: list[str]
    stages: list[StageReport] = []
    """This field and those below are for pipelines only."""
    micro_batches: MicroBatches | None = None
    moves: list[dict[str, Any]] = []
    """Of a `peer` from `source` to `target`, `at` seconds after the start, with its `reason`; `gain`: micro-batches a
    second that the peer expected to gain."""
    frozen: list[str] = []


def ddp_bytes(parameters: int, inner_steps: int, peers: int) -> int:
    """Return the bytes one peer sends in `inner_steps` ring all-reduces of fp32 gradients: 2 (N-1)/N of them each."""
    return round(inner_steps * 2 * (peers - 1) / peers * 4 * parameters)


def broken_invariants(
    commits: Mapping[str, Mapping[int, RoundCommitted]],
    ended: Mapping[str, int],
    rounds: int,
    faults: Mapping[str, Sequence[str]],
) -> list[str]:
    """Return the invariants of any run that did not hold, one sentence each.

    `commits`: by name and round. `ended`: the last round of each surviving peer. `faults`: names of the killed, added
    and, in a pipeline, frozen peers.
    """
    states: dict[tuple[int, int, int], set[str]] = {}
    for seen in commits.values():
        for commit in seen.values():
            stage = -1 if commit.stage is None else commit.stage
            states.setdefault((stage, commit.term, commit.round), set()).add(commit.state_hash)
    broken = []
    for (stage, _, number), hashes in sorted(states.items(), key=lambda item: item[0]):
        if len(hashes) > 1:
            who = "peers" if stage < 0 else f"the replicas of stage {stage}"
            broken.append(f"after round {number} {who} held {len(hashes)} different states")
    broken += [f"{name} ended at round {last} instead of {rounds}" for name, last in ended.items() if last != rounds]
    broken += [f"{name} never took part in a commit" for name in faults["added"] if not commits.get(name)]
    return broken + [f"no peer was {what}" for what, names in faults.items() if not names]


def broken_in_whole(val_losses: Mapping[int, float], rounds: int, traffic_factor: float) -> list[str]:
    """Return the invariants that did not hold of a run whose peers have the whole model."""
    broken = []
    first, last = val_losses.get(min(val_losses, default=0)), val_losses.get(rounds)
    if first is None or last is None or len(val_losses) < 2:
        broken.append("the held-out loss was not measured at both ends")
    elif not last < first:
        broken.append(f"the held-out loss did not fall ({number_text(first)} -> {number_text(last)})")
    if traffic_factor < TRAFFIC_FACTOR_MIN:
        broken.append(f"traffic is only {traffic_factor:.0f} times below that of an all-reduce every step")
    return broken


def broken_in_pipeline(losses: Mapping[int, float], rounds: int, micro_batches: MicroBatches) -> list[str]:
    """Return the invariants of a pipeline that did not hold. `losses`: of training, by round."""
    broken = []
    if len(losses) < 2 or rounds not in losses:  # an old loss is none of the last round
        broken.append("the loss was not measured at both ends, or was no number there")
    elif not losses[rounds] < losses[min(losses)]:
        broken.append(f"the loss did not fall ({losses[min(losses)]:.3f} -> {losses[rounds]:.3f})")
    if micro_batches.double_counted:
        broken.append(f"counted twice: {several(micro_batches.double_counted, 'micro-batch')}")
    if micro_batches.lost:
        broken.append(f"lost: {several(micro_batches.lost, 'micro-batch')}")
    if not micro_batches.completed:
        broken.append("no micro-batch was completed")
    return broken


def write_report(path: Path, report: Report) -> None:
    """Write report.json. Raises ResourceError."""
    try:
        path.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=2) + b"\n")
    except OSError as error:
        raise ResourceError(f"cannot write {path} ({error.strerror}): free some space, or change --home") from error
