"""The results of a quickstart: report.json and the invariants that must have held."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from cli.progress.micro_batch_audit import MicroBatches
from peer.catalogue.rounds import RoundCommitted
from peer.errors import ResourceError
from peer.figures import number_text, several

TRAFFIC_FACTOR_MIN: Final = 50.0


class PeerReport(msgspec.Struct, frozen=True, kw_only=True):
    """One peer of report.json. Times are seconds since the quickstart began."""

    name: str
    joined: float
    left: float | None
    """None if the peer stayed to the end."""
    rounds: int
    state_hash: str
    bytes_up: int
    """All bytes sent by its sockets, state transfer included."""
    bytes_down: int
    stage: int | None = None


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


class MoveReport(msgspec.Struct, frozen=True, kw_only=True):
    """A peer's move to another stage, `at` seconds after the start."""

    peer: str
    at: float
    source: int
    target: int
    reason: str
    gain: float
    """Micro-batches a second that the peer expected to gain."""


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """report.json. Losses are in nats per byte on held-out text."""

    rounds_committed: int
    """In a pipeline: by every stage."""
    rounds_discarded: int
    peers: dict[str, PeerReport]
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
    moves: list[MoveReport] = []
    frozen: list[str] = []


def ddp_bytes(parameters: int, inner_steps: int, peers: int) -> int:
    """Return the bytes one peer sends in `inner_steps` ring all-reduces of fp32 gradients: 2 (N-1)/N of them each."""
    return round(inner_steps * 2 * (peers - 1) / peers * 4 * parameters)


def broken_invariants(
    commits: Mapping[str, Mapping[int, RoundCommitted]],
    ended: Mapping[str, int],
    rounds: int,
    killed: Sequence[str],
    added: Sequence[str],
    val_losses: Mapping[int, float],
    traffic_factor: float,
) -> list[str]:
    """Return the invariants that did not hold, one sentence each.

    `commits`: by name and round. `ended`: the last round of each surviving peer.
    """
    states: dict[tuple[int, int], set[str]] = {}
    for seen in commits.values():
        for commit in seen.values():
            states.setdefault((commit.term, commit.round), set()).add(commit.state_hash)
    broken = [
        f"after round {number} peers held {len(hashes)} different states"
        for (_, number), hashes in sorted(states.items(), key=lambda item: item[0])
        if len(hashes) > 1
    ]
    broken += [f"{name} ended at round {last} instead of {rounds}" for name, last in ended.items() if last != rounds]
    broken += [f"{name} never took part in a commit" for name in added if not commits.get(name)]
    if not killed:
        broken.append("no peer was killed")
    if not added:
        broken.append("no peer was added")
    first, last = val_losses.get(min(val_losses, default=0)), val_losses.get(rounds)
    if first is None or last is None or len(val_losses) < 2:
        broken.append("the held-out loss was not measured at both ends")
    elif not last < first:
        broken.append(f"the held-out loss did not fall ({number_text(first)} -> {number_text(last)})")
    if traffic_factor < TRAFFIC_FACTOR_MIN:
        broken.append(f"traffic is only {traffic_factor:.0f} times below that of an all-reduce every step")
    return broken


def broken_in_pipeline(
    commits: Iterable[RoundCommitted],
    ended: Mapping[str, int],
    rounds: int,
    faults: Mapping[str, Sequence[str]],
    losses: Mapping[int, float],
    micro_batches: MicroBatches,
) -> list[str]:
    """Return the invariants of a pipeline that did not hold, one sentence each.

    `ended`: the last round of each surviving peer. `faults`: names of the killed, frozen and added peers. `losses`: by
    round.
    """
    states: dict[tuple[int, int, int], set[str]] = {}
    for commit in commits:
        states.setdefault((commit.stage or 0, commit.term, commit.round), set()).add(commit.state_hash)
    broken = [
        f"after round {number} the replicas of stage {stage} held {len(hashes)} different states"
        for (stage, _, number), hashes in sorted(states.items(), key=lambda item: item[0])
        if len(hashes) > 1
    ]
    broken += [f"{name} ended at round {last} instead of {rounds}" for name, last in ended.items() if last != rounds]
    broken += [f"no peer was {what}" for what, names in faults.items() if not names]
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
