"""How one machine takes part in a run, and what is open there for as long as it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dht.node import Node
from peer.ipc.corpus_messages import OwnText
from peer.net.host import Host
from peer.net.reach import Reach
from peer.worker.launch import BEHIND_THE_NETWORK
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest
from swarm.run.owners_pause import OwnersPause
from swarm.run.pause_conditions import PauseCondition

Role = Literal["auto", "full", "stage", "feeder"]
StatePlace = Literal["auto", "memory", "disk"]


@dataclass(frozen=True)
class JoinConfig:
    """The user's choices for one machine of a run."""

    home: Path
    invite: Invite
    name: str = ""
    reach: Reach = field(default_factory=Reach)
    client: bool = False
    """Whether the peer dials others and is never dialled, though it might be."""
    device: str = "auto"
    devices: tuple[str, ...] = ()
    """Several devices, of which `device` is the first; () for that one alone."""
    layout: str = "auto"
    """How several devices share the model, as `Layout.parse` takes it."""
    text: OwnText = field(default_factory=OwnText)
    """Where it names none, the run's source is read, if that is on every machine."""
    compile: bool = False
    """Whether to use torch.compile, which runs a compiler on this machine."""
    threads: int | None = None
    upload_bytes_per_s: float | None = None
    """A cap, None for no cap; so is `download_bytes_per_s`."""
    download_bytes_per_s: float | None = None
    role: Role = "auto"
    """In a pipeline "auto" is "stage"."""
    stage: int | None = None
    """The stage of a pipeline to stay in; None lets the peer choose and move."""
    memory_bytes: float | None = None
    """How much of the device's memory training may take, on a CPU of the machine's; None for what is free."""
    host_memory_bytes: float | None = None
    """Beside a GPU: how much of the machine's memory training may take."""
    state: StatePlace = "auto"
    """Where the run's state lies: "disk" for files, which memory only caches; "auto" for memory where there is room."""
    nice: int = BEHIND_THE_NETWORK
    """The niceness of the processes that train."""
    pause_when: tuple[PauseCondition, ...] = ()
    """While one of these holds, the peer rests."""
    choices: bytes = b""
    """What `Home.choices` is to hold once the peer is in the run; empty for nothing."""


@dataclass(frozen=True)
class PeerContext:
    """What is open on one machine for a run, from joining to leaving."""

    config: JoinConfig
    home: Home
    manifest: Manifest
    host: Host
    gate: Gate
    node: Node
    pause: OwnersPause
