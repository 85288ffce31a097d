"""The configuration of a peer's worker: the whole model, or one stage of it."""

from __future__ import annotations

from peer.data.corpus import within_memory
from peer.free_memory import memory_bytes
from peer.ipc.stage_spec import StageSpec
from peer.worker.client import WorkerConfig
from swarm.run.manifest_transfer import TOKENIZER_FILE
from swarm.run.peer_context import PeerContext
from swarm.run.sections import BYTES_TOKENIZER


def worker_config(context: PeerContext, stage: StageSpec | None = None) -> WorkerConfig:
    """Return what the worker is started with; `stage` None for the whole model."""
    config, manifest = context.config, context.manifest
    own_tokenizer = manifest.tokenizer != BYTES_TOKENIZER
    return WorkerConfig(
        model=manifest.model,
        data=within_memory(manifest.data, config.memory_bytes or memory_bytes()),
        inner=manifest.inner,
        tokenizer=str(config.home / TOKENIZER_FILE) if own_tokenizer else BYTES_TOKENIZER,
        data_folder=config.data_folder,
        compile=config.compile,
        device=config.device,
        directory=config.home,
        seed=manifest.run.seed,
        threads=config.threads,
        events=context.host.events,
        stage=stage,
    )
