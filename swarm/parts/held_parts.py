"""The parts of a model that a peer has on its disk: read from a checkpoint, made of one, or fetched from others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import trio

from peer.catalogue.rounds import StateProgress
from peer.checkpoint.hash_tree import StateTree
from peer.events import Event, EventLog
from peer.loading import loading
from peer.model.parameter_files import ParameterFiles
from peer.net.host import Host
from swarm.parts.part_files import PartStore, fetch_part, part_path, quantize_part
from swarm.parts.weights import HashedWeights, part_bytes, part_spans


class HeldParts:
    """The parts in `kept`, the folder of fetched and quantized ones, and in `checkpoint`, the folder of a user's own
    checkpoint of the model (None: there is none). `store` has the checked parts, and serves them to other peers."""

    def __init__(
        self,
        events: EventLog,
        weights: HashedWeights,
        kept: Path,
        checkpoint: Path | None = None,
        store: PartStore | None = None,
    ) -> None:
        self._events, self._weights, self._kept, self._checkpoint = events, weights, kept, checkpoint
        self.store = PartStore(weights) if store is None else store

    @property
    def folders(self) -> list[Path]:
        """The folders that hold the parts, the first of which counts: what was fetched before a checkpoint, of which
        some parts may be of another revision. Those of a quantized model are never in a checkpoint, but made of it."""
        if self._checkpoint is None or self._weights.quantization is not None:
            return [self._kept]
        return [self._kept, self._checkpoint]

    def missing(self, numbers: Iterable[int]) -> list[int]:
        """Return those of the parts that are not here, checked."""
        return [number for number in numbers if not self.store.serves(self._weights.checkpoint[number])]

    async def take_from_disk(self, wanted: Sequence[int], trees: Sequence[StateTree] = ()) -> None:
        """Take what the files have: of a checkpoint all parts, or make the `wanted` ones of it; and those that were
        fetched. `trees`: of each part, if it has just been hashed. Raises CheckpointError, ConfigError,
        ResourceError."""
        weights, checkpoint = self._weights, self._checkpoint
        self._kept.mkdir(exist_ok=True)
        if checkpoint is not None and weights.quantization is not None:
            original = await trio.to_thread.run_sync(ParameterFiles, [checkpoint])
            for number in (number for number in wanted if not self._path(number).exists()):
                await trio.to_thread.run_sync(quantize_part, original, weights, number, self._kept)
        plain = self._checkpoint in self.folders
        numbers = [
            number
            for number in self.missing(wanted if checkpoint is None else range(len(weights.cuts)))
            if plain or self._path(number).exists()
        ]
        files = await trio.to_thread.run_sync(ParameterFiles, self.folders)
        if trees or not numbers:
            for number in numbers:
                await self._take(files, number, tree=trees[number])
            return
        with loading(self._events.emit, "check", self.size_bytes(numbers)) as checked:
            for number in numbers:
                await self._take(files, number, checked.add)

    async def fetch(self, host: Host, numbers: Sequence[int], donors: Callable[[], Iterable[str]]) -> None:
        """Fetch parts from peers that have them. Raises NetworkError, ResourceError, CheckpointError."""
        events = self._events
        with loading(events.emit, "fetch", self.size_bytes(numbers)) as fetched:
            for place, number in enumerate(numbers):
                before = self.size_bytes(numbers[:place])
                log = arriving(events, lambda done, before=before: fetched.reach(before + done))  # type: ignore[misc]
                await fetch_part(host, donors, self._weights, number, self._kept, log)
                await self._take(await trio.to_thread.run_sync(ParameterFiles, self.folders), number)
                fetched.reach(self.size_bytes(numbers[: place + 1]))

    async def _take(
        self,
        files: ParameterFiles,
        number: int,
        hashed: Callable[[int], None] | None = None,
        tree: StateTree | None = None,
    ) -> None:
        """Serve a part from now on, if the files have it; see `PartStore.add`."""
        added = await trio.to_thread.run_sync(self.store.add, files, number, hashed, tree)
        if not added:  # where it was fetched it is damaged, and fetched again
            self._path(number).unlink(missing_ok=True)

    def _path(self, number: int) -> Path:
        return part_path(self._kept, number)

    def size_bytes(self, numbers: Sequence[int]) -> int:
        """Return the size of these parts."""
        spans = part_spans(self._weights)
        return sum(part_bytes(self._weights, spans[number]) for number in numbers)


def arriving(events: EventLog, reach: Callable[[int], None]) -> EventLog:
    """Return a log for a fetch: `reach` gets the bytes that have arrived, `events` all other events."""

    def tell(event: Event) -> None:
        if event.name == StateProgress.event_name():
            reach(int(str(event.fields["done_bytes"])))
        else:
            events.emit(event.name, **event.fields)

    return EventLog(watch=tell)
