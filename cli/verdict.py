"""From what the children of a quickstart said and left on disk to its report."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Final

import msgspec

from cli.children import ChildPeer
from cli.progress import Progress
from cli.report import PeerReport, Report, broken_invariants, ddp_bytes

if TYPE_CHECKING:
    from peer.checkpoint_file import Loaded
    from swarm.chain import Head
    from swarm.manifest import Manifest

PROMPT: Final = "def "
SAMPLE_TOKENS: Final = 200


@dataclass(frozen=True)
class Story:
    """Who was there and what befell them; lists hold child names."""

    children: Mapping[str, ChildPeer]
    killed: Sequence[str]
    added: Sequence[str]
    survivors: Sequence[str]


def judge(story: Story, progress: Progress, rounds: int, began: float) -> Report:
    """The report, with every invariant that did not hold named in it. `began`: Unix time."""
    manifest, loaded, head = _last_commit(story.children[story.survivors[0]].home)
    trained = list(progress.commits)
    rows = progress.rows
    ddp = ddp_bytes(loaded.layout.numel, head.inner_step, len(story.survivors))
    factor = ddp / max(1, *(rows[name].bytes_up for name in trained))
    broken = broken_invariants(
        progress.commits, story.survivors, rounds, story.killed, story.added, progress.val_losses, factor
    )
    if loaded.tree.root != head.state_hash:
        broken.append("the checkpoint on disk is not the state that was committed")
    final = {rows[name].state_hash for name in story.survivors} | {loaded.tree.root.hex()}
    if len(final) > 1:
        broken.append(f"the survivors ended with {len(final)} different states")
    peers = {}
    for name in (*story.survivors, *story.killed):
        child, row = story.children[name], rows[name]
        peers[_peer_id(child.home)] = PeerReport(
            name=name,
            joined=round(child.since - began, 3),
            left=None if name in story.survivors or child.until is None else round(child.until - began, 3),
            rounds=len(progress.commits.get(name, ())),
            state_hash=row.state_hash,
            bytes_up=row.bytes_up,
            bytes_down=row.bytes_down,
        )
    ids = {report.name: peer for peer, report in peers.items()}
    losses = progress.val_losses
    return Report(
        rounds_committed=head.round,
        rounds_discarded=len(progress.discarded),
        peers=peers,
        state_hash=head.state_hash.hex(),
        val_loss_first=losses.get(min(losses, default=0), float("nan")),
        val_loss_last=losses.get(max(losses, default=0), float("nan")),
        val_losses={str(number): loss for number, loss in sorted(losses.items())},
        tokens=head.tokens,
        parameters=loaded.layout.numel,
        inner_steps=head.inner_step,
        ddp_bytes_equivalent=ddp,
        traffic_factor=round(factor, 1),
        killed=[ids[name] for name in story.killed],
        added=[ids[name] for name in story.added],
        sample=_sample(manifest, loaded),
        wall_s=round(time.time() - began, 1),
        broken_invariants=broken,
    )


def train_losses(progress: Progress) -> dict[int, float]:
    """Mean training loss of the peers in each round."""
    by_round: dict[int, list[float]] = {}
    for seen in progress.commits.values():
        for number, commit in seen.items():
            if commit.fields.get("loss") is not None:
                by_round.setdefault(number, []).append(float(commit.fields["loss"]))
    return {number: fmean(values) for number, values in sorted(by_round.items())}


def _last_commit(home: Path) -> tuple[Manifest, Loaded, Head]:
    from cli.export import newest_checkpoint
    from swarm.chain import Head

    manifest, _, loaded = newest_checkpoint(home)
    return manifest, loaded, msgspec.msgpack.decode(loaded.head, type=Head)


def _peer_id(home: Path) -> str:
    from peer.identity import Identity
    from swarm.home import Home

    return Identity.load_or_create(Home(home).identity).peer_id


def _sample(manifest: Manifest, loaded: Loaded) -> str:
    """What the trained model writes after "def "."""
    from peer.generate import generate
    from peer.model import Decoder
    from peer.tokenizer import ByteTokenizer

    tokenizer = ByteTokenizer()
    ids = generate(
        Decoder(manifest.model, loaded.theta),
        tokenizer.encode(PROMPT),
        vocab_size=tokenizer.vocab_size,
        max_new_tokens=SAMPLE_TOKENS,
        temperature=0.7,
        seed=0,
    )
    return PROMPT + tokenizer.decode(ids)
