"""One block server's life: from a checkpoint or an invite to blocks that others can use, and back.

home lock -> identity -> small files -> host -> the weights, once -> manifest -> gate -> DHT node
-> the server of a model, or of a run's last commit
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.catalogue.serving import ModelEntered
from peer.checkpoint.hash_tree import StateTree
from peer.errors import ConfigError
from peer.events import Watcher
from peer.files import write_atomically
from peer.identity import Identity
from peer.ipc.span import Span
from peer.model.text.rules import TextRules
from peer.net.host import Host, open_host
from swarm.inference.record import run_schemas
from swarm.membership.open_peer import OpenPeer, open_home, open_peer
from swarm.run.bootstrap import EnteredRun, enter_run
from swarm.run.gate import Gate
from swarm.run.guests import GuestBook
from swarm.run.home import Home
from swarm.run.invite import ADDRESSES_MAX, Invite
from swarm.run.inviting import printed_invite, with_living
from swarm.run.manifest import AnyManifest, Manifest, ServedModelManifest, open_any_manifest, open_served_manifest
from swarm.run.manifest_transfer import load_run_files
from swarm.serving.config import ServeConfig
from swarm.serving.create_model import CreatedModel, PreparedModel, create_model, prepare_model
from swarm.serving.memory import check_room
from swarm.serving.model_server import ModelServer
from swarm.serving.run_server import RunServer

__all__ = ["ServeConfig", "run_server"]

OTHERS: Final = "--template NAME chooses another, for a new model or in peer api, chat and generate --chat"


async def run_server(config: ServeConfig, ready: Callable[[Invite, Span], None], watch: Watcher | None = None) -> None:
    """Serve blocks until cancelled. `ready` gets an invite to the model and the blocks, each time it begins to serve,
    `watch` every event.

    Raises ConfigError, NetworkError, NotAdmitted, ResourceError, CheckpointError.
    """
    with open_home(config.home, watch) as (home, identity, events):
        founded = await trio.to_thread.run_sync(_reopen_or_prepare, config, identity)
        known = () if config.invite is None else config.invite.addresses
        reach = replace(config.reach, bootstrap=known)
        opening = open_host(identity, events, reach)
        trees = list[StateTree]()

        async def enter(host: Host) -> EnteredRun[AnyManifest]:
            created = founded
            if isinstance(created, PreparedModel):  # only now, as it takes long: the port is ours
                created = await create_model(config.home, created, identity, host.events, config.adapters)
                trees.extend(created.trees)
            entered = await _enter(config, home, host, created)
            manifest = entered.manifest
            said = manifest.text.choice(others=OTHERS).sentence
            host.events.emit(ModelEntered(name=manifest.name, blocks=manifest.model.layers, chat_template=said))
            return entered

        async with open_peer(opening, home, enter, run_schemas) as peer:
            serving = _server(config, home, peer, trees)
            invite = _invite(config, home, peer)
            write_atomically(home.invite, f"{invite}\n".encode())
            if config.choices:
                write_atomically(home.served, config.choices)
            home.note_listening(peer.host.addresses)
            await serving.run(lambda span: ready(invite, span))


def _server(
    config: ServeConfig, home: Home, peer: OpenPeer[AnyManifest], trees: Sequence[StateTree]
) -> ModelServer | RunServer:
    """Return what serves a model, whose parts may just have been hashed, or the last commit of a training run."""
    manifest = peer.run.manifest
    if isinstance(manifest, Manifest):
        return RunServer(config, home, peer, manifest)
    return ModelServer(config, home, peer, manifest, trees)


def _invite(config: ServeConfig, home: Home, peer: OpenPeer[AnyManifest]) -> Invite:
    """Return an invite that also works through this peer: a new one of a model's founder, else the one that this peer
    came by."""
    addresses, came_by = peer.host.addresses[:ADDRESSES_MAX], config.invite
    if came_by is not None:
        both = dict.fromkeys((*addresses[: ADDRESSES_MAX // 2], *came_by.addresses))
        return msgspec.structs.replace(came_by, addresses=tuple(both)[:ADDRESSES_MAX])
    named = with_living(home, addresses)
    return printed_invite(home, peer.host.identity, peer.run.manifest, named, peer.run.gate.bans)


def _reopen_or_prepare(config: ServeConfig, identity: Identity) -> CreatedModel | PreparedModel | None:
    """Return the model that this peer has founded, or what it founds one of; None if it joins one. Reads no weights.

    Raises ConfigError, CheckpointError, and ResourceError where there is no room for the blocks."""
    founded = _founded(config, identity)
    if founded is not None:
        weights = founded if isinstance(founded, PreparedModel) else founded.manifest
        check_room(weights, config.blocks, config.compute.memory_bytes)
    return founded


def _founded(config: ServeConfig, identity: Identity) -> CreatedModel | PreparedModel | None:
    if config.invite is not None:
        return None
    kept = load_run_files(config.home)
    if kept is not None:
        manifest = open_served_manifest(kept[0])
        if manifest.authority != identity.peer_id:
            raise ConfigError(f"{config.home} serves a model of another founder: give its INVITE, or another --home")
        if config.dtype not in (None, manifest.dtype):
            raise ConfigError(
                f"{config.home} serves its model in {manifest.dtype}: drop --dtype, or give another --home"
            )
        if config.quantization not in (None, manifest.quantization):
            raise ConfigError(
                f"{config.home} serves its model {_quantized(manifest)}: drop --quantize, or give another --home"
            )
        served = {adapter.name for adapter in manifest.adapters}
        if config.adapters and {*config.adapters} != served:
            raise ConfigError(
                f"{config.home} serves its model with {', '.join(sorted(served)) or 'no adapter'}: drop --adapter, or"
                " give another --home"
            )
        if config.template is not None and not _has_template(manifest.text, config.template):
            raise ConfigError(
                f"{config.home} serves its model with another chat template: drop --template, or give another --home"
            )
        return CreatedModel(kept[0], manifest, kept[1])
    if config.folder is None:
        raise ConfigError(f"{config.home} holds no served model yet: name a checkpoint with --model")
    name = _model_name(config.folder)
    return prepare_model(config.folder, name, config.is_open, config.dtype, config.template, config.quantization)


def _quantized(manifest: ServedModelManifest) -> str:
    return "without quantization" if manifest.quantization is None else f"in {manifest.quantization}"


def _has_template(rules: TextRules, word: str) -> bool:
    """Return whether a model was founded with the template that a word names."""
    return rules.choice(word).source == rules.chat_template


def _model_name(folder: Path) -> str:
    return "".join(c if c.isalnum() or c in "._-" else "-" for c in folder.resolve().name)[:64] or "model"


async def _enter(config: ServeConfig, home: Home, host: Host, founded: CreatedModel | None) -> EnteredRun[AnyManifest]:
    if founded is not None:
        gate = Gate(host.rpc, founded.manifest, host.identity, guests=GuestBook(home.guests))
        return EnteredRun(founded.signed, founded.manifest, founded.tokenizer, gate)
    assert config.invite is not None
    chain = config.invite.membership(host.identity)
    return await enter_run(host, config.invite, home, chain, open_any_manifest)
