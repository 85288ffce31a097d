"""One volunteer's peer: opens everything that a run needs of one machine, and closes it again.

home lock -> identity -> host -> run files -> gate -> DHT node -> a replica, and another one after each move
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import replace

import trio

from peer.catalogue.groups import RunEntered
from peer.events import Watcher
from peer.files import write_atomically
from peer.net.host import Host, open_host
from peer.net.lan.discovery import Lan
from peer.worker.client import open_worker_group
from swarm.gossip.peer import run_gossip
from swarm.inference.record import run_schemas
from swarm.membership.open_peer import OpenPeer, open_home, open_peer
from swarm.membership.reachability import DialWatch
from swarm.pages.opening import open_samples
from swarm.run.bootstrap import EnteredRun, enter_run
from swarm.run.home import Home
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.owners_pause import OwnersPause
from swarm.run.pause_conditions import condition_of
from swarm.run.peer_context import JoinConfig, PeerContext
from swarm.training.complete_run import comes_too_late
from swarm.training.join_checks import check_join
from swarm.training.lifecycle import PeerLifecycle
from swarm.training.worker_config import worker_config

__all__ = ["JoinConfig", "run_participant"]

Beside = Callable[[OpenPeer[Manifest], Home], Awaitable[None]]
"""A task that a peer runs while it trains; cancelled when its training has ended."""


async def run_participant(config: JoinConfig, watch: Watcher | None = None, beside: Beside | None = None) -> None:
    """Join the run and train until it is complete or the task is cancelled; the last commit is then saved. Of a run
    that is complete already the last state is fetched, and nothing else done. `watch` gets every event.

    Raises ConfigError, NetworkError, NotAdmitted, ResourceError or CheckpointError if this machine cannot join.
    """
    with open_home(config.home, watch) as (home, identity, events):
        reach = replace(config.reach, bootstrap=config.invite.addresses)
        opening = open_host(identity, events, reach, caps=(config.upload_bytes_per_s, config.download_bytes_per_s))
        lan = Lan(config.invite.run_id) if config.reach.lan else None
        found = tuple if lan is None else lan.found

        async def enter(host: Host) -> EnteredRun[Manifest]:
            chain = config.invite.membership(identity)
            entered = await enter_run(host, config.invite, home, chain, open_manifest, found=found)
            host.events.emit(
                RunEntered(
                    name=entered.manifest.run.name,
                    role=config.role,
                    rounds=entered.manifest.run.rounds,
                    min_peers=entered.manifest.run.min_peers,
                    stages=entered.manifest.stages,
                    tokenizer=entered.manifest.tokenizer,
                )
            )
            return entered

        async with open_peer(opening, home, enter, run_schemas, lan) as peer:
            manifest = peer.run.manifest
            pause = OwnersPause(peer.host.events, home.paused, condition_of(config.pause_when))
            pause.look()
            context = PeerContext(peer.host, home, manifest, config, peer.run.gate, peer.node, pause)
            if await comes_too_late(context):
                return
            check_join(config, manifest)
            write_atomically(home.invite, f"{config.invite}\n".encode())
            if config.choices:
                write_atomically(home.choices, config.choices)
            home.note_listening(peer.host.addresses)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(pause.run)
                if config.client or not config.reach.announce:  # who names an address knows that it leads here
                    nursery.start_soon(DialWatch(peer.host, config.client).run)
                if beside is not None:
                    nursery.start_soon(beside, peer, home)
                await _train(context)
                nursery.cancel_scope.cancel()


async def _train(context: PeerContext) -> None:
    async with open_samples(context) as samples:
        supplied = replace(context, samples=samples)
        if context.manifest.outer.has_common_state:
            await PeerLifecycle(supplied).run()
            return
        async with open_worker_group(worker_config(supplied)) as worker_group:
            await run_gossip(supplied, worker_group)
