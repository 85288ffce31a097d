"""The coordinator: creates the run, invites peers, starts the run, votes as a witness and regroups. It does not train.

Its home holds what it needs after a crash: key and manifest, and for each group the initial state, its records in the
agreement and, once the run is complete, the last state.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from peer.catalogue.groups import QuorumLost, RunEntered, SecondProcess
from peer.catalogue.rounds import RunCompleted
from peer.checkpoint.generation import StateGeneration
from peer.events import Event, EventLog, Watcher
from peer.net.host import Host, open_host
from peer.net.lan.discovery import Lan
from peer.net.reach import Reach
from swarm.coordinator.base_model import open_base
from swarm.coordinator.coordinated_group import CoordinatedGroup, Disk
from swarm.coordinator.data_set import offer, open_data_set, tell_of
from swarm.coordinator.gossip_end import GossipEnd
from swarm.coordinator.last_states import LastStates
from swarm.coordinator.member_news import tell_news
from swarm.coordinator.regroup import serve_requests
from swarm.coordinator.reopen import create_or_reopen, watch_beginning
from swarm.coordinator.run_progress import RunProgress
from swarm.coordinator.second_process import refuse_second, serve_second
from swarm.coordinator.successor import Successor, enter_home, take_over
from swarm.coordinator.withdrawal import named_bans, withdraw_printed
from swarm.inference.record import run_schemas
from swarm.membership.bans import extend_bans, spread_bans
from swarm.membership.completion import COMPLETE
from swarm.membership.living import note_living
from swarm.membership.member_record import MEMBERS, MemberRecord, member_record
from swarm.membership.membership import Membership
from swarm.membership.open_peer import OpenPeer, open_home, open_peer
from swarm.protocol.head import Head
from swarm.rounds.handlers import serve_agreement, serve_heads
from swarm.run.bootstrap import EnteredRun
from swarm.run.config import RunConfig
from swarm.run.gate import Gate
from swarm.run.guests import GuestBook
from swarm.run.home import Home
from swarm.run.invite import ADDRESSES_MAX, Invite
from swarm.run.inviting import printed_invite, saved_invite_keys, with_living
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.manifest_transfer import load_run_files
from swarm.run.peer_context import Place
from swarm.state.server import serve_snapshots
from swarm.state.snapshots import SnapshotStore
from swarm.web.webhook import Webhook

NOTIFIED: Final = frozenset(kind.event_name() for kind in (QuorumLost, RunCompleted, SecondProcess))
"""The events that call for the operator. None of them can be caused by a member's claim alone."""


@dataclass(frozen=True)
class CoordinatorConfig:
    """The options of `peer coordinate`."""

    home: Path
    run: RunConfig | None
    """Creates a run in `home`, describes the one there, or replaces one that never began; None: continue with that
    one."""
    reach: Reach = field(default_factory=Reach)
    banned: tuple[str, ...] = ()
    """Peers to ban, besides those banned before, or names of invites whose guests are banned."""
    kept: tuple[str, ...] = ()
    """Peers that stay although they came by what is banned or withdrawn."""
    new_invite: bool = False
    """Whether to withdraw the invite printed so far, and print another (`swarm.coordinator.withdrawal`)."""
    restored: bool = False
    """Whether the home was put back from a backup: then the coordinator does nothing before the operator's regroup."""
    notify: str = ""
    """The http(s) URL to notify of events that need the operator; empty for none."""
    successor: Successor | None = None
    """Takes over the run of a coordinator that is lost."""
    data: Path | None = None
    """The folder of the data set that the run trains on, to be served to members; None for none."""


async def run_coordinator(
    config: CoordinatorConfig, ready: Callable[[Invite], None], watch: Watcher | None = None
) -> None:
    """Coordinate until cancelled. `ready` gets the invite once peers can join, and again whenever it names other
    members; `watch` gets every event.

    Raises ConfigError, ResourceError (also where another process has the run's key), CheckpointError, IdentityError; of
    a successor what `take_over` raises, too.
    """
    if config.successor is not None:
        enter_home(Home(config.home), config.successor)
    with open_home(config.home, watch) as (home, identity, events):
        if config.successor is not None:
            await take_over(home, config.successor)
        await refuse_second(home, () if config.successor is None else config.successor.addresses)
        before = load_run_files(config.home)
        run_files, tokenizer, states = await trio.to_thread.run_sync(
            create_or_reopen, config.home, config.run, identity, events, config.data
        )
        is_new = before is None or before[0] != run_files
        disk: Disk = "restored" if config.restored else "new" if is_new else "kept"
        manifest = open_manifest(run_files)
        library = await trio.to_thread.run_sync(open_data_set, config.data, manifest.data.pages)
        rules, stages = manifest.run, manifest.stages
        events.emit(
            RunEntered(
                name=rules.name,
                role="coordinator",
                rounds=rules.rounds,
                min_peers=rules.min_peers,
                stages=stages,
                tokenizer=manifest.tokenizer,
            )
        )
        others = () if config.successor is None else config.successor.others
        reach = replace(config.reach, bootstrap=(*config.reach.bootstrap, *others))
        opening = open_host(identity, events, reach)
        stores = list[SnapshotStore]()

        async def enter(host: Host) -> EnteredRun[Manifest]:
            gate = Gate(host.rpc, manifest, identity, guests=GuestBook(home.guests))
            named = named_bans(config.banned, config.kept, {*gate.guests.sponsors, *saved_invite_keys(home)})
            bans = extend_bans(home.bans, identity, manifest, named.peers, named.withdrawn)
            if bans is not None:
                gate.learn_bans(bans)
            stores.extend(_snapshots(state) for state in states)
            states.clear()  # the stores hold them
            base = await open_base(host, home, manifest)
            serve_snapshots(host.rpc, stores if base is None else [*stores, base.store])
            serve_second(host)
            if library is not None:
                offer(host, library)
            return EnteredRun(run_files, manifest, tokenizer, gate)

        lan = Lan(manifest.run_id) if reach.lan else None
        async with open_peer(opening, home, enter, run_schemas, lan) as peer, trio.open_nursery() as beside:
            if library is not None:
                beside.start_soon(tell_of(peer, library))
            await _coordinate(config, disk, home, peer, stores, ready)
            beside.cancel_scope.cancel()


async def _coordinate(
    config: CoordinatorConfig,
    disk: Disk,
    home: Home,
    peer: OpenPeer[Manifest],
    stores: Sequence[SnapshotStore],
    ready: Callable[[Invite], None],
) -> None:
    host, manifest, gate = peer.host, peer.run.manifest, peer.run.gate
    coordinator = _Coordinator(disk, manifest, host, home, stores)
    membership = Membership(peer.node, host, MEMBERS, manifest.run_id, coordinator.member_record)
    coordinator.membership = membership
    async with trio.open_nursery() as nursery:
        nursery.start_soon(membership.run)
        nursery.start_soon(tell_news, membership, host.events)
        nursery.start_soon(watch_beginning, home, coordinator.groups, lambda: membership.view)
        if config.notify:
            nursery.start_soon(notify, config.notify, manifest.run_id, manifest.run.name, host.events)
        for group in coordinator.groups:
            nursery.start_soon(group.run)
        nursery.start_soon(coordinator.last_states.run)
        if not coordinator.groups:
            nursery.start_soon(coordinator.gossip_end.run, membership.others)
        nursery.start_soon(serve_requests, home, coordinator.groups, host.events)
        if config.new_invite:
            place = Place(host, home, manifest)
            await withdraw_printed(place, gate, membership, coordinator.groups, config.kept)
        if gate.bans is not None:
            nursery.start_soon(spread_bans, gate, lambda: membership.view, host.peer_id, host.events)

        def show() -> None:
            known = (*host.addresses, *config.reach.bootstrap)[:ADDRESSES_MAX]
            home.note_listening(known)
            ready(printed_invite(home, host.identity, manifest, with_living(home, known), gate.bans))

        show()
        nursery.start_soon(note_living, host, home, membership.others, show)


async def notify(url: str, run_id: str, name: str, events: EventLog) -> None:
    """POST a small JSON object to the operator's web service for each event of `NOTIFIED`, until cancelled: its fields,
    its name as `event`, its Unix time as `at`, and the run's id and name. A failure is an event, `notify_failed`."""
    webhook = Webhook(url, lambda about, reason: events.emit("notify_failed", about=about, reason=reason))

    def note(event: Event) -> None:
        if event.name in NOTIFIED:
            about = {"event": event.name, "at": round(event.at, 3), "run_id": run_id, "run": name}
            webhook.send({**about, **event.fields})

    with events.subscribed(note):
        await webhook.run()


class _Coordinator:
    """Its part in each group; `membership` is set before they run. In gossip, peers agree on nothing together."""

    def __init__(self, disk: Disk, manifest: Manifest, host: Host, home: Home, stores: Sequence[SnapshotStore]) -> None:
        self.membership: Membership[MemberRecord] | None = None
        self._manifest, self._host = manifest, host
        self._began, self._session = time.time(), secrets.token_hex(8)
        rounds = manifest.run.rounds
        progress = RunProgress(synchronous=manifest.synchronous, source=manifest.group_id(0), rounds=rounds)
        stages = range(manifest.stages if manifest.outer.has_common_state else 0)
        self.groups = [
            CoordinatedGroup(host, manifest, stage, home, partial(self._replicas, stage), progress, disk)
            for stage in stages
        ]
        self.last_states = LastStates(Place(host, home, manifest), self.groups, stores, self._announce)
        self.gossip_end = GossipEnd(home, 0 if self.groups else rounds, host.events)
        drivers = {group.group: group.driver for group in self.groups}
        serve_agreement(host.rpc, lambda: drivers)
        serve_heads(host.rpc, lambda: drivers)

    async def _announce(self) -> None:
        """Publish at once what is done about the last states: the members wait for that."""
        if self.membership is not None:
            await self.membership.announce()

    def _replicas(self, stage: int) -> list[str]:
        """Return the peers whose records say that they belong to that group."""
        view = self.membership.view if self.membership else {}
        whole = self._manifest.stages == 1
        return [peer for peer, record in view.items() if whole or record.stage == stage]

    def member_record(self) -> MemberRecord:
        """Return the coordinator's record, with the head of the group furthest behind."""
        if self.gossip_end.is_over:
            first = self._manifest.first_head()  # of a common state nothing is said: there is none
            last_round = msgspec.structs.replace(first, round=self._manifest.run.rounds, state_hash=b"")
            return self._record(last_round, COMPLETE)
        last = min(self.groups, key=lambda group: group.head.round, default=None)
        over = COMPLETE if last is not None and 0 < self._manifest.run.rounds <= last.head.round else ""
        if last is None:
            return self._record(self._manifest.first_head(), "coordinating")
        return self._record(last.head, self.last_states.phase or over or last.phase)

    def _record(self, head: Head, phase: str) -> MemberRecord:
        return member_record(
            self._host,
            head,
            session=self._session,
            name="coordinator",
            role="coordinator",
            phase=phase,
            joined_at=self._began,
        )


def _snapshots(state: StateGeneration) -> SnapshotStore:
    snapshots = SnapshotStore(state.tree.size_bytes, 1 << 16)
    snapshots.publish(state)
    return snapshots
