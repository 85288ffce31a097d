"""Downloading the last commit of a run without taking part in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
import trio
from torch import Tensor

from peer.errors import ConfigError, NetworkError
from peer.ipc.span import spans_of
from peer.model.layout import join_flat
from swarm.client.session import RunClient, open_client
from swarm.gossip.pairing import PeerView
from swarm.gossip.state_transfer import find_donor
from swarm.membership.completion import COMPLETE
from swarm.membership.member_record import MemberRecord
from swarm.membership.proven_heads import POLL_S, ProvenHead
from swarm.membership.vote_shares import VoteShare, prefixes_told, vote_shares
from swarm.placement.stages import state_bytes, vectors_of
from swarm.protocol.head import Head
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest
from swarm.state.fetch import fetch_state

TRIES: Final = 5
PAUSE_S: Final = 2.0
FETCHES_FOR_A_RECORD: Final = 2  # of a stage: any peer may publish a record with a made-up round
APART_MAX: Final = 1  # rounds: stages of a pipeline commit one after the other, so they are this far apart anyway


@dataclass(frozen=True)
class Download:
    """The weights of a commit."""

    manifest: Manifest
    tokenizer: bytes
    heads: tuple[Head, ...]
    """The commit of each stage."""
    theta: Tensor
    """Outer weights of the whole model, flat fp32, shape (P,), in the order of `FlatLayout.of(manifest.model)`."""
    donors: int
    """How many peers served them."""
    shares: tuple[VoteShare, ...] = ()
    """Invites and address prefixes that hold half or more of the votes of a head."""
    losses: tuple[float, ...] = ()
    """The held-out losses that members report of themselves, in nats a byte."""


@dataclass(frozen=True)
class _Part:
    """One stage's outer weights."""

    head: Head
    theta: Tensor
    donors: frozenset[str]


async def download_head(invite: Invite, part_file: Path) -> Download:
    """Fetch the state of the highest head that is proved and held, from several of its holders at once. Of a pipeline,
    fetch that of each stage's group, where possible at most `APART_MAX` rounds apart, and join them to the whole model.

    Rounds continue meanwhile: if no peer serves the state any more before it has been fetched, the next head is tried.
    Raises NotAdmitted, DialError, and NetworkError if no proven head can be fetched.
    """
    async with open_client(invite) as client:
        if not client.training.outer.has_common_state:
            return await _download_replica(client, part_file)
        download = _HeadDownload(client, part_file)
        for attempt in range(TRIES):
            if attempt:
                await trio.sleep(PAUSE_S)
            await download.advance()
            if not download.wanted:
                break
        return download.result()


class _HeadDownload:
    """The parts fetched so far. A stage may have to be fetched again when the others have gone on too far."""

    def __init__(self, client: RunClient, part_file: Path) -> None:
        self._client, self._part_file = client, part_file
        self._parts: dict[int, _Part] = {}
        self._failures: dict[int, NetworkError] = {}
        self._told: dict[int, int] = {}  # the last round that a record names, by stage
        self._fetched = Counter[int]()
        self._prefixes: dict[str, str] = {}
        self._losses: tuple[float, ...] = ()

    @property
    def wanted(self) -> list[int]:
        """The stages still to be fetched."""
        newest = max((part.head.round for part in self._parts.values()), default=0)
        told = {stage: number for stage, number in self._told.items() if self._fetched[stage] < FETCHES_FOR_A_RECORD}
        return [
            stage
            for stage in range(self._client.training.stages)
            if stage not in self._parts or self._parts[stage].head.round < max(newest, told.get(stage, 0)) - APART_MAX
        ]

    async def advance(self) -> None:
        """Try to fetch all wanted stages at once."""
        records = await self._client.members()
        self._prefixes |= prefixes_told(records)
        self._losses = _losses(records)
        for record in records.values():
            self._told[record.stage] = max(record.round, self._told.get(record.stage, 0))
        async with trio.open_nursery() as nursery:
            for stage in self.wanted:
                nursery.start_soon(self._try, stage, records)

    def result(self) -> Download:
        """Return the whole model. Raises the NetworkError of a stage that could not be fetched."""
        manifest = self._client.training
        for stage in range(manifest.stages):
            if stage not in self._parts:
                raise self._failures[stage]
        parts = [self._parts[stage] for stage in range(manifest.stages)]
        theta = join_flat(manifest.model, [part.theta for part in parts], spans_of(manifest.cuts))
        donors = frozenset[str]().union(*(part.donors for part in parts))
        shares = list[VoteShare]()
        for stage, part in enumerate(parts):
            shares += vote_shares(manifest, part.head, self._prefixes, stage if manifest.stages > 1 else None)
        heads = tuple(part.head for part in parts)
        return Download(manifest, self._client.tokenizer, heads, theta, len(donors), tuple(shares), self._losses)

    async def _try(self, stage: int, records: Mapping[str, MemberRecord]) -> None:
        try:
            part = await self._fetch(stage, records)
            self._fetched[stage] += 1
            if stage not in self._parts or part.head.round > self._parts[stage].head.round:
                self._parts[stage] = part
        except NetworkError as error:
            whole = self._client.training.stages == 1
            self._failures[stage] = error if whole else NetworkError(f"stage {stage}: {error}")

    async def _fetch(self, stage: int, records: Mapping[str, MemberRecord]) -> _Part:
        manifest = self._client.training
        best = await self._best(records, stage)
        if best is not None:  # those that answer at once are asked again: small rounds are over in no time
            best = await self._best({peer: records[peer] for peer in best.holders if peer in records}, stage) or best
        if best is None:
            raise NetworkError("no commit was found that a peer proves and holds: try again later")
        if stage in self._parts and best.head == self._parts[stage].head:
            return self._parts[stage]
        authority = records.get(manifest.authority)
        if authority is not None and authority.round > best.head.round:
            raise NetworkError(
                f"no peer that holds round {authority.round} answers (only of round {best.head.round}):"
                " wait for a member, or export from the --home of one"
            )
        size_bytes, vectors = state_bytes(manifest, stage), len(vectors_of(manifest, stage))
        file = self._part_file.with_name(f"{self._part_file.name}.{stage}")
        return await _fetch_part(self._client, best.head, best.holders, size_bytes, vectors, file)

    async def _best(self, records: Mapping[str, MemberRecord], stage: int) -> ProvenHead | None:
        """Return the highest proven head that one of these peers holds."""
        candidates = await self._client.candidates(records, stage)
        return next((candidate for candidate in candidates if candidate.holders), None)


def _losses(records: Mapping[str, MemberRecord]) -> tuple[float, ...]:
    return tuple(record.val_loss for record in records.values() if record.val_loss is not None)


async def _download_replica(client: RunClient, part_file: Path) -> Download:
    """Fetch the weights of one peer near the group's median round: a gossip run has no common state. If that peer has
    moved on before the first chunk was requested, another is tried."""
    for _ in range(TRIES - 1):
        with suppress(NetworkError):
            return await _try_replica(client, part_file)
        await trio.sleep(PAUSE_S)
    return await _try_replica(client, part_file)


async def _try_replica(client: RunClient, part_file: Path) -> Download:
    records = await client.members()
    authority = records.get(client.training.authority)
    others = {peer: PeerView(record.round) for peer, record in records.items() if record.role == "full"}
    if not others and authority is not None and authority.phase == COMPLETE:
        raise ConfigError(
            "the run is complete and its peers have left, each with its own weights: export from the --home of one"
        )
    donor, place = await find_donor(client.host.rpc, others, POLL_S)
    manifest = client.training
    head = msgspec.structs.replace(manifest.first_head(), state_hash=place.state_hash, round=place.round)
    part = await _fetch_part(client, head, (donor,), state_bytes(manifest), 1, part_file)
    return Download(manifest, client.tokenizer, (head,), part.theta, len(part.donors), losses=_losses(records))


async def _fetch_part(
    client: RunClient, head: Head, holders: tuple[str, ...], size_bytes: int, vectors: int, part_file: Path
) -> _Part:
    rpc, events = client.host.rpc, client.host.events
    fetched = await fetch_state(rpc, lambda: holders, head.state_hash, size_bytes, part_file, events, vectors)
    return _Part(head, fetched.tensors[0], frozenset(fetched.donors))
