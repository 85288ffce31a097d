"""Creation of a run: its manifest and the initial state of each stage, kept in the coordinator's home."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
import trio
from msgspec.structs import replace as changed
from torch import Tensor

from optim.bundles import BUNDLES_MAX, Bundles
from optim.strategies.interface import RoundInfo
from optim.strategies.registry import build_strategy, shared_vectors
from peer.checkpoint.generation import StateGeneration
from peer.config import ModelConfig, WeightType
from peer.errors import CheckpointError, ConfigError
from peer.events import EventLog
from peer.identity import Identity, Signed
from peer.ipc.span import spans_of
from peer.model.huggingface import flatten, load_pretrained, weight_type
from peer.model.layout import FlatLayout, init_flat, split_flat, untie
from peer.model.text.rules import TextRules, read_text_rules
from swarm.coordinator.base_model import HashedBase, hash_base
from swarm.placement.costs import cut
from swarm.placement.stages import layout_of, open_store, slices_of_update
from swarm.protocol.messages import SLICE_BYTES_MAX
from swarm.protocol.roster_room import ROSTER_BYTES_MAX, peers_that_fit
from swarm.run.config import RunConfig
from swarm.run.features import (
    BUNDLES,
    SHARES,
    features_of,
    inner_features,
    message_features,
    model_features,
    weight_features,
)
from swarm.run.home import Home
from swarm.run.hub_models import hub_id, located
from swarm.run.manifest import PROTOCOL_VERSION, Manifest, fit_templates, sign_manifest
from swarm.run.manifest_transfer import save_run_files
from swarm.run.sections import AUTO_TOKENIZER, BYTES_TOKENIZER, check_fit, check_pipeline
from swarm.run.tokenizer import end_of_text, ended_by, read_tokenizer

CreatedRun = tuple[Signed, bytes, list[StateGeneration]]
"""The signed manifest, the tokenizer.json (empty for bytes) and each stage's state that the coordinator serves, mapped:
the initial one or, of a complete run, the last."""


def create_run(path: Path, run: RunConfig, identity: Identity, events: EventLog) -> CreatedRun:
    """Make the initial state, sign the manifest, keep both under `path`. Raises ConfigError, CheckpointError."""
    base = _base(path, run, events)
    model, theta, dtype = _model(run, base)
    tokenizer, tokenizer_name, vocabulary = read_tokenizer(run)
    if vocabulary > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocabulary} ids and the model only {model.vocab_size}: raise [model] vocab_size,"
            " or name the tokenizer that belongs to the checkpoint"
        )
    text = _text_rules(run, tokenizer_name)
    data = changed(run.data, end_of_text=end_of_text(run, tokenizer, text.eos))
    text = ended_by(text, tokenizer, data.end_of_text)
    try:
        check_fit(model, data, tokenizer_name)
        check_pipeline(run.pipeline, model, run.inner, run.outer)
    except ValueError as error:
        raise ConfigError(f"RUN.toml does not fit the model: {error}") from error
    cuts = cut(run.pipeline.stages, model, run.data.seq_len)
    states, most_slices = [], 0
    spans = spans_of(cuts)
    for span, part in zip(spans, split_flat(model, theta, spans), strict=True):
        layout = FlatLayout.of(model, span)
        shared = shared_vectors(run.outer, run.codec, layout, run.inner)
        tensors = {"theta": part, **{name: torch.zeros_like(part) for name in shared}}
        if run.outer.has_common_state:
            _check_slices(run, layout, list(tensors.values()))
            most_slices = max(most_slices, slices_of_update(run.outer, run.codec, layout, run.inner))
        states.append(StateGeneration(tensors))
    _check_roster(run, Bundles.at_most(BUNDLES_MAX, most_slices))
    bundled = (BUNDLES,) if most_slices > BUNDLES_MAX else ()
    shared = (SHARES,) if run.outer.has_common_state else ()
    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        authority=identity.peer_id,
        created_at=int(time.time()),
        requires=(
            *features_of(run.run, data, run.pipeline.stages),
            *model_features(model),
            *message_features(run.outer, run.codec),
            *inner_features(run.inner),
            *(() if base is None else weight_features(base.frozen.quantization)),
            *bundled,
            *shared,
        ),
        run=run.run,
        model=model,
        tokenizer=tokenizer_name,
        data=data,
        inner=run.inner,
        outer=run.outer,
        codec=run.codec,
        pipeline=run.pipeline,
        cuts=cuts,
        genesis=tuple(state.tree.root for state in states),
        base_model="" if run.pretrained is None else hub_id(run.pretrained.init),
        text=text,
        export_dtype=dtype,
        base=None if base is None else base.frozen,
    )
    manifest = fit_templates(manifest)
    for stage, state in enumerate(states):
        store = open_store(Home(path), manifest, stage, identity, events)
        store.prepare()
        head = msgspec.msgpack.encode(manifest.first_head(stage))
        if not trio.from_thread.run(store.save, 0, head, state, layout_of(manifest, stage)):
            raise CheckpointError(
                f"the run's initial state cannot be written under {path}: free some space and try again"
            )
    run_files = sign_manifest(identity, manifest)
    save_run_files(path, run_files, tokenizer)
    return run_files, tokenizer, reload(path, manifest, identity, events)


def reload(path: Path, manifest: Manifest, identity: Identity, events: EventLog) -> list[StateGeneration]:
    """Read the newest state of each stage that is kept under `path`. Raises CheckpointError."""
    states = []
    for stage in range(manifest.stages):
        store = open_store(Home(path), manifest, stage, identity, events)
        store.prepare()
        loaded = store.load_latest()
        if loaded is None:
            raise CheckpointError(f"the run's state under {path} is gone or damaged: restore it from a backup")
        states.append(StateGeneration(loaded.tensors, loaded.tree))
    return states


def _base(path: Path, run: RunConfig, events: EventLog) -> HashedBase | None:
    """Return the base of the adapter that is to be trained; None where the whole model is."""
    if run.adapter is None or run.pretrained is None:
        return None
    return hash_base(located(run.pretrained.init), run.pretrained, Home(path), events)


def _model(run: RunConfig, base: HashedBase | None) -> tuple[ModelConfig, Tensor, WeightType]:
    """Return the model's shape, its initial weights, flat fp32, and the type in which they were read; for a pipeline
    with the head untied. Of a model with a `base` they are the adapter's."""
    if base is not None:
        model = changed(base.model, adapter=run.adapter)
        return model, init_flat(model, run.run.seed), base.frozen.dtype
    if run.pretrained is None:
        assert run.model is not None
        return run.model, init_flat(run.model, run.run.seed), "fp32"
    model, tensors = load_pretrained(located(run.pretrained.init))
    theta, dtype = flatten(model, tensors), weight_type(tensors)
    if run.pipeline.stages > 1:
        model, theta = untie(model, theta)
    run.pretrained.check(model)
    return model, theta, dtype


def _text_rules(run: RunConfig, tokenizer: str) -> TextRules:
    """Return what the checkpoint that the run starts from says of texts, if the run reads them with its tokenizer."""
    if run.pretrained is None or run.tokenizer.source != AUTO_TOKENIZER or tokenizer == BYTES_TOKENIZER:
        return TextRules()
    return read_text_rules(located(run.pretrained.init))


def _check_slices(run: RunConfig, layout: FlatLayout, state: Sequence[Tensor]) -> None:
    """Raise ConfigError if a merged slice of the largest allowed group would not fit into a call."""
    coding = build_strategy(run.outer, run.codec, layout, run.inner).coding(RoundInfo(1, 0, run.inner.lr), state)
    largest = max(coding.result_bytes(index, run.run.max_peers) for index in range(coding.count))
    if largest > SLICE_BYTES_MAX:
        raise ConfigError(
            f"[run] max_peers is {run.run.max_peers}: with this method a merged slice of as many peers would take"
            f" {largest / 1e6:.0f} MB, and a call carries {SLICE_BYTES_MAX / 1e6:.0f}: lower max_peers, topk or rank"
        )


def _check_roster(run: RunConfig, bundles: Bundles) -> None:
    """Raise ConfigError if a roster would not hold a contribution of each peer of the largest allowed group."""
    held = peers_that_fit(bundles.count, run.pipeline.stages > 1)
    if bundles.count and held < run.run.max_peers:
        lower = f"lower max_peers to {held}, or " if held >= max(run.run.min_peers, 1) else ""
        raise ConfigError(
            f"[run] max_peers is {run.run.max_peers}: a round merges at most {ROSTER_BYTES_MAX >> 10} KiB of signed"
            f" contributions, those of {held} peers with the {bundles.count} hashes of this model each: {lower}cut it"
            " into more [pipeline] stages"
        )
