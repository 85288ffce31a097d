"""One block server's life: from a checkpoint or an invite to blocks that others can use, and back.

home lock -> identity -> host -> manifest -> gate -> DHT node -> the server of a model, or of a run's last commit
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.errors import ConfigError
from peer.events import Watcher
from peer.files import write_atomically
from peer.identity import Identity
from peer.ipc.span import Span
from peer.model.text_rules import TextRules
from peer.net.host import Host, HostConfig
from swarm.inference.record import run_schemas
from swarm.membership.open_peer import OpenPeer, PeerConfig, open_home, open_peer
from swarm.run.bootstrap import EnteredRun, enter_run
from swarm.run.gate import Gate
from swarm.run.guests import GuestBook
from swarm.run.home import Home
from swarm.run.invite import ADDRESSES_MAX, Invite
from swarm.run.inviting import printed_invite, with_living
from swarm.run.manifest import AnyManifest, Manifest, open_any_manifest, open_served_manifest
from swarm.run.manifest_transfer import load_run_files
from swarm.serving.config import ServeConfig
from swarm.serving.create_model import CreatedModel, FoundedModel, create_model
from swarm.serving.model_server import ModelServer
from swarm.serving.run_server import RunServer

__all__ = ["ServeConfig", "run_server"]

OTHERS: Final = "--template NAME chooses another, for a new model or in peer api, chat and generate --chat"


async def run_server(config: ServeConfig, ready: Callable[[Invite, Span], None], watch: Watcher | None = None) -> None:
    """Serve blocks until cancelled. `ready` gets an invite to the model and the blocks, each time it begins to serve,
    `watch` every event.

    Raises ConfigError, NetworkError, NotAdmitted, ResourceError, CheckpointError.
    """
    with open_home(config.home, watch) as opened:
        home, identity = opened.home, opened.identity
        founded = await trio.to_thread.run_sync(_create_or_reopen, config, identity)
        host_config = HostConfig(
            identity=identity,
            events=opened.events,
            listen=config.listen,
            announce=config.announce,
            relays=config.relays,
            map_port=config.map_port,
        )

        async def enter(host: Host) -> EnteredRun[AnyManifest]:
            entered = await _enter(config, home, host, founded)
            manifest = entered.manifest
            said = manifest.text.choice(others=OTHERS).sentence
            host.events.emit("model_entered", name=manifest.name, blocks=manifest.model.layers, chat_template=said)
            return entered

        known = config.invite.addresses if config.invite is not None else ()
        peer_config = PeerConfig(host_config, home, known)
        async with open_peer(peer_config, enter, run_schemas) as peer:
            serving = _server(config, home, peer)
            invite = _invite(config, home, peer)
            write_atomically(home.invite, f"{invite}\n".encode())
            home.note_listening(peer.host.addresses)
            await serving.run(lambda span: ready(invite, span))


def _server(config: ServeConfig, home: Home, peer: OpenPeer[AnyManifest]) -> ModelServer | RunServer:
    """Return what serves a model, or the last commit of a training run."""
    manifest = peer.run.manifest
    if isinstance(manifest, Manifest):
        return RunServer(config, home, peer, manifest)
    return ModelServer(config, home, peer, manifest)


def _invite(config: ServeConfig, home: Home, peer: OpenPeer[AnyManifest]) -> Invite:
    """Return an invite that also works through this peer: a new one of a model's founder, else the one that this peer
    came by."""
    addresses, came_by = peer.host.addresses[:ADDRESSES_MAX], config.invite
    if came_by is not None:
        both = dict.fromkeys((*addresses[: ADDRESSES_MAX // 2], *came_by.addresses))
        return msgspec.structs.replace(came_by, addresses=tuple(both)[:ADDRESSES_MAX])
    named = with_living(home, addresses)
    return printed_invite(home, peer.host.identity, peer.run.manifest, named, peer.run.gate.bans)


def _create_or_reopen(config: ServeConfig, identity: Identity) -> CreatedModel | None:
    """Return the model that this peer founds or has founded; None if it joins one."""
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
        if config.template is not None and not _has_template(manifest.text, config.template):
            raise ConfigError(
                f"{config.home} serves its model with another chat template: drop --template, or give another --home"
            )
        return CreatedModel(kept[0], manifest, kept[1])
    if config.folder is None:
        raise ConfigError(f"{config.home} holds no served model yet: name a checkpoint with --model")
    wanted = FoundedModel(_model_name(config.folder), config.is_open, config.dtype, config.template)
    return create_model(config.home, config.folder, identity, wanted)


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
