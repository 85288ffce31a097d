"""The commits of a training run, for a server that follows them: which is the last one, and its weights as a file.

Only what is proved is served (`swarm.membership.proven_heads`). A commit of a pipeline is one of all stages at one
round.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
import trio
from blake3 import blake3
from safetensors.torch import save_file

from peer.config import HiddenType, WeightType
from peer.errors import NetworkError, ResourceError
from peer.events import EventLog
from peer.footprint.parameters import EMBEDDING
from peer.footprint.workload import FLOAT_BYTES
from peer.ipc.span import Span, spans_of
from peer.loading import loading
from peer.model.layout import FlatLayout
from swarm.client.session import RunClient
from swarm.inference.record import COMMIT_BYTES, ServedCommit
from swarm.membership.head_history import ask_history
from swarm.membership.proven_heads import ProvenHead
from swarm.parts.held_parts import arriving
from swarm.placement.stages import layout_of, state_bytes
from swarm.protocol.head import Head
from swarm.run.manifest import Manifest
from swarm.state.fetch import fetch_ranges

WEIGHTS_FILE: Final = "model.safetensors"
_BEHIND_MAX: Final = 8  # heads: the stages of a pipeline commit one after the other
_TORCH: Final[dict[WeightType, torch.dtype]] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class RunCommit:
    """One commit of a run, as its heads prove it."""

    heads: tuple[Head, ...]
    """Of each stage, of one round."""
    holders: tuple[tuple[str, ...], ...]
    """The peers that hold the state of each."""

    @property
    def served(self) -> ServedCommit:
        hashes = [head.hash for head in self.heads]
        name = hashes[0] if len(hashes) == 1 else blake3(b"".join(hashes)).digest()
        return ServedCommit(self.heads[0].round, name[:COMMIT_BYTES])


def served_type(manifest: Manifest) -> HiddenType:
    """Return the type in which a run's commits are served: that of its export, fp16 as fp32."""
    return "bf16" if manifest.export_dtype == "bf16" else "fp32"


async def last_commit(client: RunClient) -> RunCommit | None:
    """Return the last commit that is proved for all stages and held by a peer that answers; None if there is none."""
    records = await client.members()
    found: list[ProvenHead] = []
    for candidates in await client.all_candidates(records):
        held = next((candidate for candidate in candidates if candidate.holders), None)
        if held is None:
            return None
        found.append(held)
    common = min(held.head.round for held in found)
    heads = [await _at_round(client, held, common) for held in found]
    if any(head is None for head in heads):
        return None
    return RunCommit(tuple(head for head in heads if head is not None), tuple(held.holders for held in found))


async def _at_round(client: RunClient, held: ProvenHead, number: int) -> Head | None:
    """Return the head of that round on the way to a proved one."""
    if held.head.round == number:
        return held.head
    before = await ask_history(client.host, held.head, held.holders, heads_max=_BEHIND_MAX)
    return next((head for head in reversed(before) if head.round == number), None)


class CommitFiles:
    """The weights of commits in a folder, a folder each: those of the blocks that are served."""

    def __init__(self, folder: Path, client: RunClient, events: EventLog) -> None:
        self._folder, self._client, self._events = folder, client, events

    async def fetch(self, commit: RunCommit, span: Span) -> Path:
        """Fetch a span's weights of a commit to disk from the peers that hold them; return their folder. Raises
        NetworkError, also if those peers have moved on, and ResourceError."""
        target = self._folder / commit.served.name.hex()
        self._folder.mkdir(parents=True, exist_ok=True)
        stages = spans_of(self._client.training.cuts)
        wanted = [n for n, stage in enumerate(stages) if stage.first < span.end and span.first < stage.end]
        sizes = [FLOAT_BYTES * layout_of(self._client.training, stage).numel for stage in wanted]
        flats: dict[int, torch.Tensor] = {}
        try:
            with loading(self._events.emit, "fetch", sum(sizes)) as fetched:
                for place, stage in enumerate(wanted):
                    before = sum(sizes[:place])
                    log = arriving(self._events, lambda done, before=before: fetched.reach(before + done))  # type: ignore[misc]
                    flats[stage] = await self._fetch_stage(commit, stage, log)
            await trio.to_thread.run_sync(self._write, target, flats, span)
        finally:
            self._drop_parts()
        return target

    async def _fetch_stage(self, commit: RunCommit, stage: int, events: EventLog) -> torch.Tensor:
        """Return a stage's weights, flat fp32, mapped."""
        manifest, host = self._client.training, self._client.host
        file = self._folder / f"stage-{stage}.part"
        numel, size_bytes = layout_of(manifest, stage).numel, state_bytes(manifest, stage)
        root, holders = commit.heads[stage].state_hash, commit.holders[stage]
        weights = [(0, FLOAT_BYTES * numel)]

        async def fetch(donors: tuple[str, ...]) -> torch.Tensor:
            fetched = await fetch_ranges(host.rpc, lambda: donors, root, size_bytes, weights, file, events)
            return fetched.flat[:numel]

        if host.peer_id in holders:  # it trains: its own copy crosses no network
            with suppress(NetworkError):  # it has gone on
                return await fetch((host.peer_id,))
        return await fetch(tuple(peer for peer in holders if peer != host.peer_id))

    def _write(self, target: Path, flats: Mapping[int, torch.Tensor], span: Span) -> None:
        """Write the parameters of the blocks as the run's export has them."""
        manifest = self._client.training
        exported, served = _TORCH[manifest.export_dtype], _TORCH[served_type(manifest)]
        if manifest.model.adapter is not None:
            exported = served = torch.float32
        wanted = set(FlatLayout.of(manifest.model, span).slots)
        if span.is_last and manifest.model.tie_embeddings and manifest.model.adapter is None:  # of one stage then
            wanted.add(EMBEDDING)
        tensors = {
            name: flat[slot.offset : slot.offset + slot.numel].view(slot.shape).to(exported).to(served).contiguous()
            for stage, flat in flats.items()
            for name, slot in layout_of(manifest, stage).slots.items()
            if name in wanted
        }
        partial = target.with_suffix(".tmp")
        shutil.rmtree(partial, ignore_errors=True)
        try:
            partial.mkdir(parents=True)
            save_file(tensors, partial / WEIGHTS_FILE)
            partial.replace(target)
        except OSError as error:
            raise ResourceError(
                f"{target} cannot be written ({error.strerror}): free space, or choose another --home"
            ) from error

    def _drop_parts(self) -> None:
        """Remove what was fetched; the file of a commit has a copy."""
        for file in self._folder.glob("*.part"):
            file.unlink(missing_ok=True)

    def keep(self, commits: Sequence[ServedCommit]) -> None:
        """Remove the files of all other commits."""
        names = {commit.name.hex() for commit in commits}
        for path in self._folder.iterdir() if self._folder.is_dir() else ():
            if path.name in names:
                continue
            if path.is_dir():
                shutil.rmtree(path, ignore_errors=True)
            else:
                path.unlink(missing_ok=True)
