"""Fetching the last commit of a run for somebody who does not take part in it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio
from torch import Tensor

from optim.config import Gossip
from optim.recipes.registry import shared_vectors
from peer.errors import NetworkError
from peer.layout import FlatLayout
from swarm.chain import Head, genesis
from swarm.fetch import fetch_state
from swarm.follow import POLL_S, Sighting
from swarm.gossip.lending import find_donor
from swarm.gossip.pairing import Seen
from swarm.invite import Invite
from swarm.manifest import Manifest
from swarm.visit import Visitor, visit

TRIES: Final = 5
PAUSE_S: Final = 2.0


@dataclass(frozen=True)
class Download:
    """theta: outer weights, flat fp32, shape (P,), in the order of `FlatLayout.of(manifest.model)`."""

    manifest: Manifest
    tokenizer: bytes
    head: Head
    theta: Tensor
    donors: int


async def download_head(invite: Invite, part_file: Path) -> Download:
    """The state of the head that a quorum stands at, from several of its holders at once.

    Rounds go on meanwhile: if the state is gone from all shelves before it has been fetched, the next head is tried.
    Raises NotAdmitted, DialError, and NetworkError if no head with a quorum is to be had.
    """
    async with visit(invite) as visitor:
        if isinstance(visitor.manifest.outer, Gossip):
            return await _download_replica(visitor, part_file)
        vectors = _vectors(visitor.manifest)
        failure = NetworkError("no commit that a majority of its members stands by was found: try again later.")
        for attempt in range(TRIES):
            if attempt:
                await trio.sleep(PAUSE_S)
            records = await visitor.members()
            sightings = await visitor.sightings(list(records))
            if not sightings:
                continue
            best = sightings[0]
            authority = records.get(visitor.manifest.authority)
            if authority is not None and authority.round > best.head.round:
                failure = NetworkError(
                    f"nobody who holds round {authority.round} is there (only round {best.head.round} is):"
                    " wait for a member, or export from one's --home."
                )
                continue
            try:
                theta, donors = await _fetch_theta(visitor, best, vectors, part_file)
            except NetworkError as error:
                failure = error
                continue
            return Download(visitor.manifest, visitor.tokenizer, best.head, theta, donors)
        raise failure


async def _download_replica(visitor: Visitor, part_file: Path) -> Download:
    """In a gossip run there is no common state: the weights of one peer near the middle of the group."""
    records = await visitor.members()
    others = {peer: Seen(record.round) for peer, record in records.items() if record.role == "full"}
    donor, place = await find_donor(visitor.host.rpc, others, POLL_S)
    manifest = visitor.manifest
    head = msgspec.structs.replace(genesis(manifest.run_id, place.state_hash), round=place.round)
    theta, donors = await _fetch_theta(visitor, Sighting(head, (donor,), None), 1, part_file)
    return Download(manifest, visitor.tokenizer, head, theta, donors)


def _vectors(manifest: Manifest) -> int:
    """How many vectors the run's state has."""
    layout = FlatLayout.of(manifest.model)
    return 1 + len(shared_vectors(manifest.outer, manifest.codec, layout, manifest.inner))


async def _fetch_theta(visitor: Visitor, best: Sighting, vectors: int, part_file: Path) -> tuple[Tensor, int]:
    rpc, root, events = visitor.host.rpc, best.head.state_hash, visitor.host.events
    size_bytes = vectors * 4 * FlatLayout.of(visitor.manifest.model).numel
    fetched = await fetch_state(rpc, lambda: best.holders, root, size_bytes, part_file, events, vectors)
    return fetched.tensors[0], len(fetched.donors)
