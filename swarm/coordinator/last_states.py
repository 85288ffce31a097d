"""The last state of each group at the coordinator: fetched from the members before these may leave, kept as a
checkpoint in its home, and served as long as it runs.

Only the state of the head where the coordinator itself stands is taken, whose votes it has checked, and only if its
hash is right. Where all members have left before (they wait for a limited time, and not for a coordinator that is
away), it is fetched from the first that comes back.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Final

import trio

from peer.catalogue.groups import LastStateMissing
from peer.errors import BarnraiseError, ResourceError
from swarm.coordinator.coordinated_group import CoordinatedGroup
from swarm.membership.completion import FETCHING, WANTING
from swarm.membership.proven_heads import ProvenHead, ask_proven_heads
from swarm.placement.commits import fetch_commit, save_commit
from swarm.placement.stages import vectors_of
from swarm.run.peer_context import Place
from swarm.state.fetch import Fetched
from swarm.state.snapshots import SnapshotStore

LOOK_S: Final = 0.5
ASK_S: Final = 4.0
PATIENT_S: Final = 10.0  # the members take the last commit a moment later; after a restart they connect first
SAVE_AGAIN_S: Final = 5.0
NO_HOLDER: Final = "no peer serves it: start one again that took part to the end, with its --home"


class LastStates:
    """Brings the last state of each group here. `stores`: what serves each group's states."""

    def __init__(
        self,
        place: Place,
        groups: Sequence[CoordinatedGroup],
        stores: Sequence[SnapshotStore],
        announce: Callable[[], Awaitable[None]],
    ) -> None:
        """The states that `stores` serve now were read from disk. `announce` publishes the present `phase`."""
        self._place, self._groups, self._stores, self._announce = place, groups, stores, announce
        self._on_disk = {name for store in stores for name in store.state_hashes}
        self._fetching = 0
        self._one = trio.Lock()  # fetch at a time: a state is in memory until it is on disk
        self._patient_until: dict[int, float] = {}
        self._told: dict[int, LastStateMissing] = {}
        for group, store in zip(groups, stores, strict=False):  # a gossip run has no groups
            group.keeps = store.serves

    @property
    def phase(self) -> str:
        """The phase while states are not kept yet; empty where there are none."""
        if not any(group.lacks_last_state for group in self._groups):
            return ""
        return FETCHING if self._fetching else WANTING

    async def run(self) -> None:
        """Bring what is missing, until cancelled. Events: last_state_missing, and run_completed of each group once its
        state is kept."""
        async with trio.open_nursery() as nursery:
            for stage, group in enumerate(self._groups):
                nursery.start_soon(self._follow, stage, group)

    async def _follow(self, stage: int, group: CoordinatedGroup) -> None:
        while True:
            if not await group.driver.changed.until(lambda: group.lacks_last_state, LOOK_S):
                continue
            if group.head.state_hash not in self._on_disk and not await self._bring(stage, group):
                await trio.sleep(LOOK_S)
            elif group.head.state_hash in self._on_disk:
                group.keep()
                await self._announce()

    async def _bring(self, stage: int, group: CoordinatedGroup) -> bool:
        """Fetch the state of the group's last head from the peers that hold it, serve it, and write it to disk; return
        whether it was fetched."""
        found = await self._find(group)
        if found is None:
            if trio.current_time() > self._patient_until.setdefault(stage, trio.current_time() + PATIENT_S):
                self._tell_missing(stage, NO_HOLDER)
            return False
        self._fetching += 1
        try:
            async with self._one:
                await self._announce()
                fetched = await fetch_commit(self._place, stage, found)
                self._stores[stage].publish(fetched.named(vectors_of(self._place.manifest, stage)))
                saved = await self._save(stage, found, fetched)
        except BarnraiseError as error:
            self._tell_missing(stage, str(error))
            return False
        finally:
            self._fetching -= 1
        while not saved:  # it is served from memory meanwhile, but the members hear that it is not kept
            await trio.sleep(SAVE_AGAIN_S)
            saved = await self._save(stage, found, fetched)
        return True

    async def _find(self, group: CoordinatedGroup) -> ProvenHead | None:
        """Return the group's last head with the peers that hold its state; None if there are none."""
        head = group.head
        peers = [*(member.peer for member in head.members), *group.known_peers()]
        found = await ask_proven_heads(self._place.host, group.driver.config, peers, ASK_S)
        return next((proven for proven in found if proven.head == head and proven.holders), None)

    async def _save(self, stage: int, found: ProvenHead, fetched: Fetched) -> bool:
        """Write the state to disk; return whether that went well."""
        try:
            saved = await save_commit(self._place, stage, found, fetched)
        except ResourceError as error:
            self._tell_missing(stage, str(error))
            return False
        if saved:
            self._on_disk.add(found.head.state_hash)
        return saved

    def _tell_missing(self, stage: int, reason: str) -> None:
        """Tell the operator, once for each reason, that the last state is not kept."""
        group = self._groups[stage]
        missing = LastStateMissing(round=group.head.round, reason=reason)
        if self._told.get(stage) != missing:
            self._told[stage] = missing
            group.tell(missing)
