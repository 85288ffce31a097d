"""The configuration of a peer's worker: the whole model, or one stage of it."""

from __future__ import annotations

from peer.data.text_corpus import within_memory
from peer.ipc.stage_spec import StageSpec
from peer.ipc.train_messages import LoadBase
from peer.machine import memory_bytes
from peer.worker.client import WorkerConfig
from swarm.run.manifest_transfer import TOKENIZER_FILE
from swarm.run.peer_context import PeerContext
from swarm.run.sections import BYTES_TOKENIZER
from swarm.training.machine_memory import accelerator_of, host_limit, layout_of, state_lies_on_disk, step_size


def worker_config(context: PeerContext, stage: StageSpec | None = None, base: LoadBase | None = None) -> WorkerConfig:
    """Return what the worker is started with; `stage` None for the whole model, `base` what an adapter is beside."""
    config, manifest = context.config, context.manifest
    limit = host_limit(config, accelerator_of(config, manifest).kind)
    own_tokenizer = manifest.tokenizer != BYTES_TOKENIZER
    return WorkerConfig(
        model=manifest.model,
        data=within_memory(manifest.data, limit or memory_bytes()),
        inner=config.compute.applied_to(manifest.inner),
        run=manifest.run_id,
        tokenizer=str(config.home / TOKENIZER_FILE) if own_tokenizer else BYTES_TOKENIZER,
        text=config.text,
        pages=context.samples.folders,
        compute=config.compute,
        ranks=layout_of(config, manifest),
        step_size=step_size(config, manifest) if stage is None else None,
        directory=config.home,
        vectors_in_files=state_lies_on_disk(config, manifest, 0 if stage is None else stage.index),
        seed=manifest.run.seed,
        events=context.host.events,
        suspended=context.pause.paused and stage is None,  # a paused peer opens no replica of a stage
        nice=config.nice,
        stage=stage,
        base=base,
    )
