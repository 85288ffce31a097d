"""How one machine takes part in a run, and what is open there for as long as it does."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from dht.node import Node
from peer.footprint.layout import Compute
from peer.ipc.corpus_messages import OwnText
from peer.net.host import Host
from peer.net.reach import Reach
from peer.worker.launch import BEHIND_THE_NETWORK
from swarm.protocol.samples import OwnSamples, SampleSupply
from swarm.run.gate import Gate
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest
from swarm.run.owners_pause import OwnersPause
from swarm.run.pause_conditions import PauseCondition
from swarm.state.upload_limits import SnapshotLimits, UploadSlots

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
    compute: Compute = field(default_factory=Compute)
    text: OwnText = field(default_factory=OwnText)
    """Where it names none, the run's source is read, if that is on every machine. In a run of pages it names a folder
    with all of them."""
    base: Path | None = None
    """The folder of the base's checkpoint, in a run with an adapter; None to fetch the base."""
    data_cache_bytes: float | None = None
    """Room for pages that come from other peers; None: as `swarm.pages.sizes.cache_bytes` finds."""
    data_url: str = ""
    """A web server with the folder of the run's data set, asked where no member has a page; "" for none."""
    upload_bytes_per_s: float | None = None
    """A cap, None for no cap; so is `download_bytes_per_s`."""
    download_bytes_per_s: float | None = None
    role: Role = "auto"
    """In a pipeline "auto" is "stage"."""
    stage: int | None = None
    """The stage of a pipeline to stay in; None lets the peer choose and move."""
    state: StatePlace = "auto"
    """Where the run's state lies: "disk" for files, which memory only caches; "auto" for memory where there is room."""
    nice: int = BEHIND_THE_NETWORK
    """The niceness of the processes that train."""
    pause_when: tuple[PauseCondition, ...] = ()
    """While one of these holds, the peer rests."""
    choices: bytes = b""
    """The content for `Home.choices` once the peer is in the run; empty for none."""


@dataclass(frozen=True)
class Place:
    """One machine of a run: a peer or its coordinator."""

    host: Host
    home: Home
    manifest: Manifest


@dataclass(frozen=True)
class PeerContext(Place):
    """Resources open on one machine for a run, from joining to leaving."""

    config: JoinConfig
    gate: Gate
    node: Node
    pause: OwnersPause
    samples: SampleSupply = field(default_factory=OwnSamples)
    """What brings the run's samples to this machine."""
    uploads: UploadSlots = field(default_factory=lambda: UploadSlots(SnapshotLimits()))
    """What all states and pages that this peer gives share."""
