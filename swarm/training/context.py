"""How one machine takes part in a run, and what it has open for as long as it does."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

from dht.node import Node
from peer.ipc.stage_spec import StageSpec
from peer.net.host import Host
from peer.worker.client import WorkerConfig
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest
from swarm.run.manifest_transfer import TOKENIZER_FILE
from swarm.run.sections import BYTES_TOKENIZER

Role = Literal["auto", "full", "stage", "feeder"]


@dataclass(frozen=True)
class JoinConfig:
    """How this machine takes part. `data_folder` overrides the manifest's; caps in bytes per second, None for no
    cap. Of a pipeline: `role` "auto" is "stage", `stage` pins one, and `memory_bytes` is what there is for it."""

    home: Path
    invite: Invite
    name: str = ""
    listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",)
    announce: tuple[str, ...] = ()
    relays: tuple[str, ...] = ()
    device: str = "auto"
    data_folder: str = ""
    threads: int | None = None
    upload_bytes_per_s: float | None = None
    download_bytes_per_s: float | None = None
    role: Role = "auto"
    stage: int | None = None
    memory_bytes: float | None = None


@dataclass(frozen=True)
class PeerContext:
    """One machine's part of a run that outlives its seat in any group of it."""

    config: JoinConfig
    home: Home
    manifest: Manifest
    host: Host
    gate: Gate
    node: Node

    def worker_group(self, stage: StageSpec | None = None) -> WorkerConfig:
        """For the worker: of the whole model, or of a stage of it."""
        config, manifest, data = self.config, self.manifest, self.manifest.data
        if config.data_folder:
            data = msgspec.structs.replace(data, source="folder", path=config.data_folder)
        own = manifest.tokenizer != BYTES_TOKENIZER
        return WorkerConfig(
            model=manifest.model,
            data=data,
            inner=manifest.inner,
            tokenizer=str(config.home / TOKENIZER_FILE) if own else BYTES_TOKENIZER,
            device=config.device,
            directory=config.home,
            seed=manifest.run.seed,
            threads=config.threads,
            events=self.host.events,
            stage=stage,
        )
