"""The configuration of a node and the DHT's constants. Times in seconds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import trio

from dht.storage import DEFAULT_LIMITS, StorageLimits


@dataclass(frozen=True)
class DhtConfig:
    """Defaults suit records that live 9-30 s in a swarm of a few to a few hundred peers across the internet."""

    replicas: int = 64
    """Up to this many nodes known alive, ourselves among them, each keeps every record, and no lookup is made."""
    stores: int = 6
    """In a larger network, Kademlia's k: how many nodes keep a record. A record is lost only if all of them die between
    two refreshes, which are a few seconds apart. Each store costs about 2 ms of CPU a put, both sides together."""
    readers: int = 3
    """How many stores a read asks beside its own; `stores` for `relookup_s` after a split was healed."""
    parallel: int = 3
    """Kademlia's alpha: queries of one lookup in flight."""
    reply_timeout_s: float = 0.75
    """How long to wait for one query. A slower peer is skipped and probed in the background until it answers."""
    hedge_s: float = 0.25
    """After this much silence one more peer is asked."""
    lookup_budget_s: float = 1.2
    """A lookup returns the records that it has by then."""
    probe_timeout_s: float = 5.0
    """A peer that does not answer within this is dead."""
    bootstrap_timeout_s: float = 5.0
    refresh_s: float = 15.0
    refresh_max_s: float = 60.0
    """Interval of looking up the own neighbourhood: `refresh_s` at first, doubled while nothing changes."""
    relookup_s: float = 20.0
    """How long the k closest of a key are remembered."""
    checkup_s: float = 30.0
    """Interval of asking each reachable bootstrap peer for its view, to detect a split."""
    redial_min_s: float = 1.0
    redial_max_s: float = 60.0
    """Back-off of unreachable bootstrap peers."""
    redial_strangers_max_s: float = 600.0
    """Back-off of lost and cached peers, of which there may be hundreds."""
    redial_alone_s: float = 5.0
    """The longest back-off of a node that knows no live peer."""
    cache_save_s: float = 30.0
    leave_timeout_s: float = 0.5


DEFAULT_TUNING: Final = DhtConfig()


@dataclass(frozen=True)
class NodeConfig:
    """Everything that one node needs to join the DHT of a run."""

    namespace: str
    """The run id. Nodes of other namespaces refuse our calls."""
    bootstrap: Sequence[str] = ()
    """Full multiaddrs of the peers to ask first."""
    cache: Path | None = None
    """The file in which peers are remembered from one start to the next."""
    required: bool = False
    """Whether `open_node` raises DialError if there are addresses, here or in the cache, and no peer answers."""
    tuning: DhtConfig = DEFAULT_TUNING
    limits: StorageLimits = DEFAULT_LIMITS
    met: trio.MemoryReceiveChannel[str] | None = None
    """Peers that this host is connected to by other ways, to ask as well when they come."""
