"""One volunteer's peer: opens everything that a run needs of one machine, and closes it again.

home lock -> identity -> host -> run files -> gate -> DHT node -> a replica, and another one after each move
"""

from __future__ import annotations

from dht.node import NodeConfig, open_node
from optim.config import GossipConfig
from peer.errors import ConfigError
from peer.events import EventLog
from peer.files import write_atomically
from peer.identity import Identity
from peer.net.host import HostConfig, open_host
from peer.worker.client import open_worker_group
from swarm.gossip.peer import run_gossip
from swarm.membership.member_record import MEMBERS
from swarm.membership.reachability import serve_dial_back
from swarm.placement.stages import stage_costs
from swarm.run.bootstrap import enter_run
from swarm.run.home import Home
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.manifest_transfer import serve_run_files
from swarm.run.peer_context import JoinConfig, PeerContext
from swarm.training.lifecycle import PeerLifecycle
from swarm.training.worker_config import worker_config

__all__ = ["JoinConfig", "run_participant"]


async def run_participant(config: JoinConfig) -> None:
    """Join the run and train until it is complete or the task is cancelled; the last commit is then saved.

    Raises ConfigError, NetworkError, NotAdmitted, ResourceError or CheckpointError if this machine cannot join.
    """
    home = Home(config.home)
    with home.locked():
        events = EventLog(home.events)
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
            check_role(config, manifest)
            write_atomically(home.invite, f"{config.invite}\n".encode())
            write_atomically(home.listening, "".join(f"{address}\n" for address in host.addresses).encode())
            rules, stages = manifest.run, manifest.stages
            events.emit("run_entered", name=rules.name, role=config.role, rounds=rules.rounds, stages=stages)
            serve_run_files(host.rpc, entered.signed, entered.tokenizer)
            serve_dial_back(host)
            node_config = NodeConfig(manifest.run_id, config.invite.addresses, home.addresses)
            async with open_node(host, node_config, [MEMBERS]) as node:
                context = PeerContext(config, home, manifest, host, entered.gate, node)
                if isinstance(manifest.outer, GossipConfig):
                    async with open_worker_group(worker_config(context)) as worker_group:
                        await run_gossip(context, worker_group)
                else:
                    await PeerLifecycle(context).run()


def check_role(config: JoinConfig, manifest: Manifest) -> None:
    """Raise ConfigError unless the run has a place for the role and stage of `config`."""
    if manifest.stages == 1:
        if config.role not in ("auto", "full") or config.stage not in (None, 0):
            raise ConfigError("in this run every peer holds the whole model: leave out --role and --stage")
    elif config.role == "full":
        raise ConfigError(f"--role full, but the model is cut into {manifest.stages} stages: choose --role stage")
    elif config.role == "feeder" and config.stage is not None:
        raise ConfigError("a feeder has no stage: leave out either --role feeder or --stage")
    elif config.stage is not None and not 0 <= config.stage < manifest.stages:
        raise ConfigError(f"there is no stage {config.stage}: choose 0 to {manifest.stages - 1}, or leave --stage out")
    check_memory(config, manifest)


def check_memory(config: JoinConfig, manifest: Manifest) -> None:
    """Raise ConfigError if --memory-limit is too small for this peer's stage, or for every stage."""
    if config.memory_bytes is None or config.role == "feeder":
        return
    needs = [cost.memory_bytes for cost in stage_costs(manifest)]
    needed, what, remedy = min(needs), "the smallest stage", "raise it, or join with --role feeder"
    if manifest.stages == 1:
        what, remedy = "the model", "raise it"
    elif config.stage is not None:
        needed, what = needs[config.stage], f"stage {config.stage}"
        remedy = "raise it, or leave --stage out" if min(needs) <= config.memory_bytes else remedy
    if needed > config.memory_bytes:
        limit = f"--memory-limit is {config.memory_bytes / 1e9:.3g} GB"
        raise ConfigError(f"{limit} and {what} needs {needed / 1e9:.3g} GB: {remedy}")
