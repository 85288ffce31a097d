"""A run's beginning: its initial state, its manifest, both kept in the coordinator's home."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
import trio

from optim.config import Gossip
from optim.recipes.interface import Turn
from optim.recipes.registry import build_recipe, shared_vectors
from peer.checkpoint import CheckpointStore
from peer.chunks import StateTree, hash_state
from peer.errors import CheckpointError, ConfigError
from peer.events import EventLog
from peer.hf import load_pretrained
from peer.identity import Identity, Signed
from peer.layout import FlatLayout, init_flat
from swarm.charter import save_charter
from swarm.home import Home
from swarm.manifest import PROTOCOL_VERSION, Manifest, check_fit, sign_manifest
from swarm.messages import SLICE_BYTES_MAX
from swarm.run_config import RunConfig
from swarm.tokenizer_file import read_tokenizer


@dataclass(frozen=True)
class InitialState:
    """The run's initial outer state: "theta" and what else the method shares, flat fp32, shape (P,)."""

    tensors: dict[str, torch.Tensor]
    tree: StateTree


Founded = tuple[Signed, bytes, InitialState]
"""The signed manifest, the tokenizer.json (or nothing) and the state of round 0."""


def found(path: Path, run: RunConfig, identity: Identity, events: EventLog) -> Founded:
    """Make the initial state, sign the manifest, keep both."""
    tokenizer, tokenizer_name, vocabulary = read_tokenizer(run)
    if run.pretrained is not None:
        model, tensors = load_pretrained(Path(run.pretrained.init))
        layout = FlatLayout.of(model)
        theta = torch.empty(layout.numel)
        for name, view in layout.views(theta).items():
            view.copy_(tensors[name])
    else:
        assert run.model is not None
        model, theta = run.model, init_flat(run.model, run.run.seed)
        layout = FlatLayout.of(model)
    shared = shared_vectors(run.outer, run.codec, layout, run.inner)
    tensors_now = {"theta": theta, **{name: torch.zeros_like(theta) for name in shared}}
    _check_slices(run, layout, list(tensors_now.values()))
    state = InitialState(tensors_now, hash_state(list(tensors_now.values())))
    if vocabulary > model.vocab_size:
        raise ConfigError(
            f"the tokenizer has {vocabulary} ids and the model only {model.vocab_size}: raise [model] vocab_size,"
            " or name the tokenizer that belongs to the checkpoint."
        )
    try:
        check_fit(model, run.data, tokenizer_name)
    except ValueError as error:
        raise ConfigError(f"RUN.toml does not fit the model: {error}; mend that field.") from error
    manifest = Manifest(
        protocol=PROTOCOL_VERSION,
        authority=identity.peer_id,
        created_at=int(time.time()),
        run=run.run,
        model=model,
        tokenizer=tokenizer_name,
        data=run.data,
        inner=run.inner,
        outer=run.outer,
        codec=run.codec,
        pipeline=run.pipeline,
        cuts=((0, model.layers),),
        genesis=(state.tree.root,),
    )
    first = manifest.first_head()
    store = CheckpointStore(Home(path).checkpoints, identity, manifest.run_id, events)
    store.prepare()
    if not trio.from_thread.run(store.save, 0, msgspec.msgpack.encode(first), tensors_now, layout):
        raise CheckpointError(f"the run's initial state cannot be written under {path}: free some space and try again.")
    charter = sign_manifest(identity, manifest)
    save_charter(path, charter, tokenizer)
    return charter, tokenizer, state


def reload(path: Path, manifest: Manifest, identity: Identity, events: EventLog) -> InitialState:
    """The initial state, from disk."""
    store = CheckpointStore(Home(path).checkpoints, identity, manifest.run_id, events)
    store.prepare()
    loaded = store.load_latest()
    if loaded is None:
        raise CheckpointError(f"the run's initial state under {path} is gone or damaged: restore it from a backup.")
    return InitialState(loaded.tensors, loaded.tree)


def _check_slices(run: RunConfig, layout: FlatLayout, state: Sequence[torch.Tensor]) -> None:
    """ConfigError if a merged slice would not fit a call once the group is as large as it may get."""
    if isinstance(run.outer, Gossip):
        return
    coding = build_recipe(run.outer, run.codec, layout, run.inner).coding(Turn(1, 0, run.inner.lr), state)
    largest = max(coding.result_bytes(index, run.run.max_peers) for index in range(coding.count))
    if largest > SLICE_BYTES_MAX:
        raise ConfigError(
            f"[run] max_peers is {run.run.max_peers}: with this method a merged slice of so many peers would take"
            f" {largest / 1e6:.0f} MB, and a call carries {SLICE_BYTES_MAX / 1e6:.0f}: lower max_peers, topk or rank."
        )
