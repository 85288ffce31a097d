"""The frozen base of a run with an adapter, on one machine: there already, or fetched part by part from members."""

from __future__ import annotations

import fcntl
import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Final

import trio
from blake3 import blake3

from peer.catalogue.groups import BaseFetching
from peer.errors import BarnraiseError, CheckpointError, ConfigError
from peer.events import EventLog
from peer.net.host import Host
from swarm.parts.held_parts import HeldParts
from swarm.parts.part_files import PartStore
from swarm.parts.weights import BaseWeights
from swarm.run.hub_models import in_cache
from swarm.run.manifest import Manifest

_LOOK_S: Final = 0.2


async def local_base(
    manifest: Manifest,
    kept: Path,
    own: Path | None,
    events: EventLog,
    store: PartStore | None = None,
    numbers: Sequence[int] | None = None,
) -> HeldParts:
    """Take the parts of the base that are on this machine: those of the user's checkpoint `own`, or of the Hub's cache,
    else those in the folder `kept`. `numbers`: of the wanted parts, None for all.

    Raises ConfigError for a run without a base and where `own` is not the base, CheckpointError, ResourceError."""
    weights = BaseWeights.of(manifest)
    if weights is None:
        raise ConfigError(f"{manifest.name!r} trains a whole model, beside no base: leave the base out")
    wanted = range(len(weights.cuts)) if numbers is None else numbers
    if own is not None:
        held = HeldParts(events, weights, kept, own, store)
        await _take_own(held, own, wanted)
        return held
    if (cached := await trio.to_thread.run_sync(in_cache, manifest.base_model)) is not None:
        held = HeldParts(events, weights, kept, cached, store)
        try:
            await held.take_from_disk(wanted)
            return held
        except (CheckpointError, ConfigError):  # damaged, or half downloaded
            held.store.clear()
    held = HeldParts(events, weights, kept, None, store)
    await held.take_from_disk(wanted)
    return held


async def bring_base(
    host: Host,
    manifest: Manifest,
    kept: Path,
    own: Path | None,
    donors: Callable[[], Iterable[str]],
    store: PartStore | None = None,
    numbers: Sequence[int] | None = None,
) -> HeldParts:
    """As `local_base`; what is not here is fetched into `kept` from `donors`. A trainer and a server of one home take
    turns. Event: base_fetching. Raises NetworkError, too."""
    async with _alone(kept):
        held = await local_base(manifest, kept, own, host.events, store, numbers)
        weights = BaseWeights.of(manifest)
        assert weights is not None
        missing = held.missing(range(len(weights.cuts)) if numbers is None else numbers)
        if missing:
            host.events.emit(BaseFetching(parts=len(missing), size_bytes=held.size_bytes(missing)))
            missing.sort(key=partial(_place, host.peer_id))
            await held.fetch(host, missing, lambda: (peer for peer in donors() if peer != host.peer_id))
    return held


async def _take_own(held: HeldParts, own: Path, wanted: Sequence[int]) -> None:
    """Take the parts of the checkpoint that the user has named. Raises ConfigError unless it is the base."""
    why = ""
    try:
        await held.take_from_disk(wanted)
    except BarnraiseError as error:
        why = f" ({error})"
    if why or held.missing(wanted):
        raise ConfigError(
            f"--base {own} is not the base of this run{why}: name the folder of the checkpoint that its coordinator"
            " names, or leave --base out to fetch the base from members"
        )


def _place(peer: str, number: int) -> bytes:
    """Return the place of a part in a peer's own order: peers that join together begin with different parts, which they
    then pass on to each other."""
    return blake3(f"{peer}/{number}".encode()).digest()


@asynccontextmanager
async def _alone(kept: Path) -> AsyncIterator[None]:
    """Wait until no other task or process fetches into the folder, and keep others waiting."""
    os.makedirs(kept, exist_ok=True)
    fd = os.open(kept / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                await trio.sleep(_LOOK_S)
        yield
    finally:
        os.close(fd)
