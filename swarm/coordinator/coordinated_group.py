"""The coordinator's part in one group: the whole run, or the replicas of one stage. It keeps no weights while they
change; the last ones are brought and kept by `swarm.coordinator.last_states`.

Its decisions are in `swarm.protocol.agreement.coordination`. This module informs its node of the other groups: a group
begins once it has a peer and the run has `min_peers` in all groups. A stage may lose all of its replicas, and continue
from an older commit. `RunProgress.fast_forward` then brings that to the position of the other stages: what the stage
learned since is lost, but its weights are of the same epoch as theirs. That stays outside the node, which knows one
group.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Final, Literal

import torch
import trio

from optim.strategies.interface import OuterStrategy
from optim.strategies.registry import build_strategy
from peer.catalogue.groups import StageSetBack, VotesInOneHand
from peer.catalogue.happening import Happening
from peer.catalogue.rounds import HeadSeen, RunCompleted
from peer.events import Field
from peer.net.address_prefix import prefix_of
from peer.net.host import Host
from peer.notifier import Notifier
from swarm.coordinator.run_progress import RunProgress
from swarm.membership.vote_shares import vote_shares
from swarm.placement.stages import layout_of
from swarm.protocol.agreement import actions
from swarm.protocol.agreement.work import Work
from swarm.protocol.head import Head
from swarm.protocol.timeouts import AdaptiveTimeouts
from swarm.rounds.group_driver import DriverOptions, GroupDriver
from swarm.rounds.records import RecordFiles
from swarm.rounds.work import work_of
from swarm.run.agreement import agreement_config, schedule_of, sponsors_of, stages_before
from swarm.run.home import Home
from swarm.run.manifest import Manifest

CAUSES_MAX: Final = 64  # that the operator is told of
BEGIN_S: Final = 30.0  # a peer that was away dials again within this time
Disk = Literal["new", "kept", "restored"]
"""A coordinator's home: made by this process, there before it, or put back from a backup as the operator says."""
STEPS_ASIDE_S: Final = 3.0  # a group's number of waiting peers counts this long: it is told once a second


class CoordinatedGroup:
    """One group's driver, and its reports to the other groups and the operator."""

    def __init__(
        self,
        host: Host,
        manifest: Manifest,
        stage: int,
        home: Home,
        known_peers: Callable[[], Iterable[str]],
        progress: RunProgress,
        disk: Disk = "new",
    ) -> None:
        """`home`: the coordinator's. `known_peers`: those whose records say that they belong to the group. `disk`: the
        group of a home that existed before begins only `BEGIN_S` after the process: it may have begun already."""
        self.stage = stage if manifest.stages > 1 else None
        self.told = Notifier()
        """Notified of each event that `last_told` holds."""
        self.last_told: dict[str, dict[str, Field]] = {}
        """The fields of the last event of each name."""
        self.known_peers = known_peers
        self._host, self._manifest, self._progress = host, manifest, progress
        self._waiting, self._waited_at = 0, 0.0
        self._told_shares = set[str]()
        timeouts = AdaptiveTimeouts(manifest.run.timeout_floor_s)
        config = agreement_config(manifest, stage, host.peer_id)
        if disk == "kept":
            config = replace(config, begin_s=BEGIN_S)
        records = RecordFiles(home.stage(stage, manifest.stages).agreement)
        options = DriverOptions(
            restored=disk == "restored",
            per_prefix=manifest.run.members_per_prefix,
            tell=self._hear,
            keeps=lambda name: self.keeps(name),
        )
        work = self._work(stage, timeouts)
        self.driver = GroupDriver(host, config, work, records, timeouts, known_peers, options)
        self.head: Head = self.driver.head
        """The last head whose certificate is on this disk."""
        self.keeps: Callable[[bytes], bool] = lambda state_hash: False
        """Whether the coordinator serves the state with that hash."""
        self.kept = b""
        """The hash of the last state, once it is on this disk and served."""
        progress.add(self)

    def _work(self, stage: int, timeouts: AdaptiveTimeouts) -> Work:
        manifest, before = self._manifest, stages_before(self._manifest, stage, self._host.peer_id)
        no_exchange: Callable[[Head], float] = lambda head: timeouts.exchange_s(0)  # noqa: E731
        return replace(
            work_of(strategy_of(manifest, stage), schedule_of(manifest, stage), no_exchange, stages=before),
            sponsors=sponsors_of(manifest),
            fast_forward=self._fast_forward,
            may_begin=self._may_begin,
            is_over=lambda: self._progress.completed,
            is_known=lambda peer: self._progress.is_member_beside(self.group, peer),
        )

    @property
    def group(self) -> str:
        return self.driver.group

    @property
    def completed(self) -> trio.Event:
        return self.driver.completed

    @property
    def lacks_last_state(self) -> bool:
        """Whether the group has made its last commit, and its state is not kept here yet."""
        return 0 < self._manifest.run.rounds <= self.head.round and self.head.state_hash != self.kept

    def keep(self) -> None:
        """Note that the last state is kept: with that the group is complete."""
        self.kept = self.head.state_hash
        self._host.watch((), cause=self.group)  # its members may go
        self.tell(RunCompleted(round=self.head.round))

    @property
    def peers(self) -> int:
        """How many peers take part or, before the group has begun, wait to."""
        if self.head.members:
            return len(self.head.members) + len(self.head.learners)
        return self._waiting if trio.current_time() - self._waited_at < STEPS_ASIDE_S else 0

    @property
    def away(self) -> tuple[str, ...]:
        """The members of the last head that this machine is not connected to."""
        return tuple(member.peer for member in self.head.members if not self._host.is_connected(member.peer))

    @property
    def connected(self) -> int:
        """How many peers of the group this machine is connected to, members or not."""
        peers = {*self.known_peers(), *(member.peer for member in self.head.members)}
        return sum(map(self._host.is_connected, peers))

    @property
    def needed(self) -> int:
        """With how many peers, of all its groups, the run begins."""
        return self._manifest.run.min_peers

    @property
    def phase(self) -> str:
        """The coordinator's activity, for display."""
        return self.driver.phase if self.head.members else "waiting for peers"

    async def run(self) -> None:
        """Take part until cancelled."""
        if self.head.members:
            self._tell_head()
        await self.driver.run(self)

    # -- Actor ---------------------------------------------------------------------------------------------------------

    async def perform(self, action: actions.Action, tasks: trio.Nursery) -> None:
        if isinstance(action, actions.CommitHead):
            self.head = action.head
            self._tell_head()

    async def save(self, state_hash: bytes) -> None:
        raise AssertionError("the coordinator accepts no state")

    # -- events --------------------------------------------------------------------------------------------------------

    def _hear(self, event: str, fields: dict[str, Field]) -> None:
        """Tell what the node says; that the run is complete waits for the last state."""
        if event != RunCompleted.event_name():
            self._tell(event, fields)

    def tell(self, event: Happening) -> None:
        """Report an event of this group to the operator and the tasks that wait for `told`."""
        self._tell(*event.stream_form())

    def _tell(self, event: str, fields: dict[str, Field]) -> None:
        stage = {} if self.stage is None else {"stage": self.stage}
        self._host.events.emit(event, **fields, **stage)
        self.last_told[event] = fields
        self.told.notify()

    def _tell_head(self) -> None:
        head = self.head
        members, absent = len(head.members), len(head.absent)
        self.tell(HeadSeen(round=head.round, members=members, absent=absent, tokens=head.tokens))
        prefixes = {member.peer: prefix_of(self._host.remote_ip(member.peer)) for member in self.head.members}
        for share in vote_shares(self._manifest, self.head, prefixes):
            if (cause := share.invite or share.prefix) not in self._told_shares and len(self._told_shares) < CAUSES_MAX:
                self._told_shares.add(cause)
                votes, invite, prefix = share.votes, share.invite, share.prefix
                number, of = self.head.round, share.members
                self.tell(VotesInOneHand(round=number, votes=votes, members=of, invite=invite, prefix=prefix))

    # -- the other groups ----------------------------------------------------------------------------------------------

    def _may_begin(self, waiting: int) -> bool:
        self._waiting, self._waited_at = waiting, trio.current_time()
        return self._progress.peers >= self._manifest.run.min_peers

    def _fast_forward(self, head: Head) -> Head:
        if self.stage is None or not head.members:
            return head
        fresh = self._progress.fast_forward(head)
        if fresh.round != head.round:
            self.tell(StageSetBack(round=head.round, goes_on_at=fresh.round))
        return fresh


def strategy_of(manifest: Manifest, stage: int) -> OuterStrategy:
    """Return the method's rules for a stage, without the memory of a peer that trains: it is never touched here."""
    with torch.device("meta"):
        return build_strategy(manifest.outer, manifest.codec, layout_of(manifest, stage), manifest.inner)
