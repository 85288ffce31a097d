"""One volunteer's peer: opens everything that a run needs of one machine, and closes it again.

home lock -> identity -> host -> run files -> gate -> DHT node -> a replica, and another one after each move
"""

from __future__ import annotations

from dht.node import NodeConfig, open_node
from optim.config import GossipConfig
from peer.events import EventLog, Watcher
from peer.files import write_atomically
from peer.identity import Identity
from peer.net.host import HostConfig, open_host
from peer.worker.client import open_worker_group
from swarm.gossip.peer import run_gossip
from swarm.membership.member_record import member_schema
from swarm.membership.reachability import serve_dial_back
from swarm.membership.told_events import serve_events
from swarm.run.bootstrap import enter_run
from swarm.run.home import Home
from swarm.run.manifest import open_manifest
from swarm.run.manifest_transfer import serve_run_files
from swarm.run.peer_context import JoinConfig, PeerContext
from swarm.training.complete_run import comes_too_late
from swarm.training.join_checks import check_join
from swarm.training.lifecycle import PeerLifecycle
from swarm.training.worker_config import worker_config

__all__ = ["JoinConfig", "run_participant"]


async def run_participant(config: JoinConfig, watch: Watcher | None = None) -> None:
    """Join the run and train until it is complete or the task is cancelled; the last commit is then saved. Of a run
    that is complete already the last state is fetched, and nothing else done. `watch` gets every event.

    Raises ConfigError, NetworkError, NotAdmitted, ResourceError or CheckpointError if this machine cannot join.
    """
    home = Home(config.home)
    with home.locked():
        events = EventLog(home.events, watch=watch)
        identity = Identity.load_or_create(home.identity)
        host_config = HostConfig(
            identity=identity,
            events=events,
            listen=config.listen,
            announce=config.announce,
            relays=config.relays,
            upload_bytes_per_s=config.upload_bytes_per_s,
            download_bytes_per_s=config.download_bytes_per_s,
        )
        async with open_host(host_config) as host:
            chain = config.invite.membership(identity)
            entered = await enter_run(host, config.invite, home, chain, open_manifest)
            manifest = entered.manifest
            rules, stages = manifest.run, manifest.stages
            events.emit(
                "run_entered",
                name=rules.name,
                role=config.role,
                rounds=rules.rounds,
                stages=stages,
                tokenizer=manifest.tokenizer,
            )
            serve_run_files(host.rpc, entered.signed, entered.tokenizer)
            serve_dial_back(host)
            serve_events(host)
            node_config = NodeConfig(manifest.run_id, config.invite.addresses, home.addresses)
            async with open_node(host, node_config, [member_schema(entered.gate)]) as node:
                context = PeerContext(config, home, manifest, host, entered.gate, node)
                if await comes_too_late(context):
                    return
                check_join(config, manifest)
                write_atomically(home.invite, f"{config.invite}\n".encode())
                write_atomically(home.listening, "".join(f"{address}\n" for address in host.addresses).encode())
                if isinstance(manifest.outer, GossipConfig):
                    async with open_worker_group(worker_config(context)) as worker_group:
                        await run_gossip(context, worker_group)
                else:
                    await PeerLifecycle(context).run()
