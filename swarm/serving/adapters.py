"""The adapters of a served model: founded from PEFT's files, fetched by their hashes, given to the worker by number."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.checkpoint.hash_tree import hash_state
from peer.config import ModelConfig
from peer.errors import ConfigError
from peer.events import EventLog
from peer.ipc.block_messages import LoadAdapter
from peer.ipc.span import Span
from peer.model.adapter_files import load_adapter
from peer.model.layout import FlatLayout
from peer.model.parameter_files import ParameterFiles
from peer.net.host import Host
from swarm.parts.held_parts import HeldParts
from swarm.parts.part_files import PartStore, part_tensors, write_part
from swarm.parts.weights import AdapterWeights, part_bytes
from swarm.run.home import Home
from swarm.run.manifest import ADAPTERS_MAX, ServedAdapter, ServedModelManifest
from swarm.run.sections import check_name

_WHOLE: Final = 0  # an adapter is one part


def found_adapters(home: Home, model: ModelConfig, folders: Mapping[str, Path]) -> tuple[ServedAdapter, ...]:
    """Read adapters of a base by name, and keep them under `home` as they are sent. Blocks. Raises CheckpointError for
    one that does not fit the base, ConfigError for a name that cannot be, ResourceError."""
    if len(folders) > ADAPTERS_MAX:
        raise ConfigError(f"--adapter was given {len(folders)} times: serve at most {ADAPTERS_MAX} adapters of a model")
    found = []
    for name, folder in folders.items():
        try:
            check_name(name)
        except ValueError as error:
            raise ConfigError(f"--adapter {name}={folder}: {error}") from error
        adapted, flat = load_adapter(folder, model)
        assert adapted.adapter is not None
        weights, draft = AdapterWeights(adapted, (bytes(32),)), home.adapters / "new"
        draft.mkdir(parents=True, exist_ok=True)
        views = FlatLayout.of(adapted).views(flat)
        write_part(weights, _WHOLE, views.values(), draft)
        root = hash_state(part_tensors(ParameterFiles([draft]), weights, _span(adapted))).root
        adapter = ServedAdapter(name=name, adapter=adapted.adapter, root=root)
        kept = _folder(home, adapter)
        kept.mkdir(exist_ok=True)
        for path in draft.iterdir():
            path.replace(kept / path.name)
        found.append(adapter)
    return tuple(found)


class HeldAdapters:
    """A served model's adapters at one server."""

    def __init__(self, home: Home, manifest: ServedModelManifest, events: EventLog) -> None:
        self._home, self._adapters = home, manifest.adapters
        self._held = [
            HeldParts(events, _weights(manifest.model, adapter), _folder(home, adapter)) for adapter in self._adapters
        ]
        self._weights = [_weights(manifest.model, adapter) for adapter in self._adapters]

    @property
    def stores(self) -> Sequence[PartStore]:
        """What serves them to other servers."""
        return [held.store for held in self._held]

    @property
    def size_bytes(self) -> int:
        """What all of them take."""
        return sum(part_bytes(weights, _span(weights.model)) for weights in self._weights)

    async def bring(self, host: Host, donors: Callable[[], Iterable[str]]) -> None:
        """Have all of them on this disk, checked. Raises NetworkError, ResourceError, CheckpointError."""
        for adapter, held in zip(self._adapters, self._held, strict=True):
            folder = _folder(self._home, adapter)
            await trio.to_thread.run_sync(lambda folder=folder: folder.mkdir(parents=True, exist_ok=True))
            await held.take_from_disk([_WHOLE])
            if held.missing([_WHOLE]):
                await held.fetch(host, [_WHOLE], donors)

    @property
    def numbers(self) -> dict[bytes, int]:
        """The worker's numbers of the adapters, by what a session names them with."""
        return {adapter.tag: number for number, adapter in enumerate(self._adapters)}

    @property
    def loads(self) -> tuple[LoadAdapter, ...]:
        """What a worker loads, in the order of `numbers`."""
        return tuple(
            LoadAdapter(str(_folder(self._home, adapter).absolute()), adapter.adapter) for adapter in self._adapters
        )


def _weights(model: ModelConfig, adapter: ServedAdapter) -> AdapterWeights:
    return AdapterWeights(msgspec.structs.replace(model, adapter=adapter.adapter), (adapter.root,))


def _span(model: ModelConfig) -> Span:
    return Span.whole(model.layers)


def _folder(home: Home, adapter: ServedAdapter) -> Path:
    return home.adapters / adapter.tag.hex()
