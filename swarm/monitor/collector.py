"""The collector: every few seconds one reading through one client connection, and from it the state.

It reads records and heads as `peer status` does, then what led to the last heads, then the events that members
report. Each part has a bound in time and in memory. Where no peer answers it tries again, and says so.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Final

import trio
from msgspec.structs import replace

from peer.catalogue.groups import PeerPenalized
from peer.errors import BarnraiseError, DeadlineExceeded, DialError, NetworkError
from peer.events import Event
from swarm.client.session import RunClient, open_client
from swarm.inference.record import SERVERS, run_schemas, servers_key
from swarm.membership.membership import read_records
from swarm.monitor.member_events import MemberEvents
from swarm.monitor.told_counts import ToldCounts
from swarm.run.invite import Invite
from swarm.run.manifest import AnyManifest, Manifest
from swarm.status.alerts import Alerts
from swarm.status.head_chain import HeadChain, follow_history
from swarm.status.help_wanted import help_wanted
from swarm.status.model_state import model_state
from swarm.status.reading import RunReading, read_run
from swarm.status.record_history import RecordHistory, last_round
from swarm.status.run_state import run_state
from swarm.status.state import KeptHome, MonitorState, Verdict, Watch
from swarm.status.verdict import EXPORT_HOME

EVERY_S: Final = 5.0
READING_S: Final = 40.0
"""A reading ends after this time, whatever peers do."""
AGAIN_S: Final = 5.0
REOPEN_AFTER: Final = 12
"""After this many readings without any answer the connection is opened again."""

_OVER: Final = f"the last round is in the home: {EXPORT_HOME}"

Remember = Callable[[MonitorState, Sequence[HeadChain]], Awaitable[None]]
"""Takes each state, with the chain of each stage, before it is shown: what follows from a state finds it remembered."""


class MonitorCollector:
    """The state of one run or served model, kept up to date. `run` ends only by an error that waiting does not mend."""

    def __init__(
        self,
        invite: Invite,
        home: Path | None = None,
        names_invites: bool = False,
        clock: Callable[[], float] = time.time,
        remember: Remember | None = None,
        read_home: Callable[[], KeptHome | None] | None = None,
    ) -> None:
        """`home`: its saved addresses help to reach the run. `names_invites`: whether the state may name invites and
        address prefixes, as no other reads it. `read_home` blocks, and returns what a home keeps of the run; it is
        asked once the run is not reached."""
        self._invite, self._home, self._names_invites = invite, home, names_invites
        self._clock, self._remember, self._read_home = clock, remember, read_home
        self._kept: KeptHome | None = None
        self._watch = Watch(started_at=clock(), readings=0, failed=0, last_success=None, reading_s=None)
        self._manifest: AnyManifest | None = None
        self.chains: list[HeadChain] = []
        """Of each stage."""
        self._events, self._records, self._alerts = MemberEvents(since=clock()), RecordHistory(), Alerts()
        self._turn = trio.Event()
        self._silent = 0  # readings in a row that found no peer
        self._lies = 0
        self.state = self._unreached("the monitor has not reached the run yet")

    @property
    def counts(self) -> ToldCounts:
        """Return what members' events add up to."""
        return self._events.counts

    async def run(self) -> None:
        """Look until cancelled. Raises NotAdmitted, ConfigError or ResourceError."""
        while True:
            try:
                async with self._opened() as client:
                    await self._follow(client)
            except NetworkError as error:
                await self._failed(error)
            await trio.sleep(AGAIN_S)

    async def once(self) -> MonitorState:
        """Look once, with the history that one reading asks for. Raises what keeps the run from being reached;
        then the state has what the home keeps."""
        try:
            async with self._opened() as client:
                await self._look(client)
        except NetworkError as error:
            await self._failed(error)
            raise
        return self.state

    @property
    def now(self) -> float:
        """Seconds since the Unix epoch, by the clock of this collector."""
        return self._clock()

    async def changed(self) -> MonitorState:
        """Wait for the next state."""
        await self._turn.wait()
        return self.state

    def _opened(self) -> AbstractAsyncContextManager[RunClient]:
        return open_client(self._invite, self._home, schemas=run_schemas)

    async def _follow(self, client: RunClient) -> None:
        """Read every `EVERY_S` until no peer has answered for long."""
        with client.host.events.subscribed(self._note):
            self._silent = 0
            while self._silent < REOPEN_AFTER:
                due = trio.current_time() + EVERY_S
                try:
                    with trio.fail_after(READING_S):
                        await self._look(client)
                except NetworkError as error:
                    await self._failed(error)
                except trio.TooSlowError:
                    await self._failed(DeadlineExceeded(f"a reading took more than {READING_S:.0f} s"))
                await trio.sleep_until(due)

    async def _look(self, client: RunClient) -> None:
        began, manifest = trio.current_time(), client.manifest
        if self._manifest is None:
            self._manifest = manifest
            self.chains = [HeadChain() for _ in range(manifest.stages if isinstance(manifest, Manifest) else 0)]
        servers = await read_records(client.node, client.host, SERVERS, servers_key(manifest.run_id))
        events, records = self._events, self._records
        if isinstance(manifest, Manifest):
            reading = await read_run(client, servers)
            await self._look_at_run(client, reading)
            self._has_read(began, silent=not reading.records and not any(reading.best))
            told, outcomes, whole = events.told(), events.outcomes(), self._names_invites
            state = run_state(reading, self.chains, told, outcomes, records, self._watch, whole)
        else:
            records.note(servers)
            await self._poll_events(client, sorted(servers))
            self._has_read(began, silent=not servers)
            told, outcomes = events.told(), events.outcomes()
            state = model_state(manifest, self._clock(), servers, told, outcomes, records, self._watch)
        await self._publish(state)

    async def _look_at_run(self, client: RunClient, reading: RunReading) -> None:
        """Bring what is known of the run up to a reading of it."""
        self._records.note({**reading.servers, **reading.records})
        async with trio.open_nursery() as nursery:
            for stage, chain in enumerate(self.chains):
                nursery.start_soon(follow_history, client.host, chain, reading.best[stage], reading.at)
            nursery.start_soon(self._poll_events, client, asked_for_events(reading))
        proved = (chain.last.round for chain in self.chains if chain.last)
        last = last_round(reading.records, proved, not reading.manifest.outer.has_common_state)
        self._records.note_losses(reading.records, last)

    async def _poll_events(self, client: RunClient, peers: Sequence[str]) -> None:
        await self._events.poll(client.host, peers, self._clock())

    def _has_read(self, began: float, silent: bool) -> None:
        """Take note of a reading. `silent`: it found no peer."""
        self._silent = self._silent + 1 if silent else 0
        self._watch = replace(
            self._watch,
            readings=self._watch.readings + 1,
            last_success=self._clock(),
            reading_s=round(trio.current_time() - began, 3),
            failure="",
            lies=self._lies,
        )

    async def _failed(self, error: BarnraiseError) -> None:
        self._watch = replace(self._watch, failed=self._watch.failed + 1, failure=why_not(error), lies=self._lies)
        self._silent += 1
        if self._kept is None and self._read_home is not None and not self._watch.readings:
            self._kept = await trio.to_thread.run_sync(self._read_home)
        await self._publish(self._unreached(why_not(error)))

    def _unreached(self, why: str) -> MonitorState:
        """Return the last state, as one that is not current."""
        remedy = "start the coordinator or a member again; `peer doctor INVITE` says what fails. This monitor tries on"
        verdict = Verdict(level="unknown", word="not reached", reason=why, remedy=remedy, basis=("seen",))
        if self._manifest is None or self._watch.readings == 0:
            kept = self._kept
            if kept is not None:
                reason = f"{why}; what the home keeps is shown, which is of the past"
                remedy = _OVER if kept.rounds and kept.round == kept.rounds else remedy
                verdict = replace(verdict, reason=reason, remedy=remedy)
            return MonitorState(
                kind="unknown",
                at=self._clock(),
                run_id=self._invite.run_id,
                name=kept.name if kept is not None else "",
                open=kept is not None and kept.open,
                verdict=verdict,
                home=kept,
                monitor=self._watch,
            )
        return replace(self.state, verdict=verdict, monitor=self._watch)

    async def _publish(self, state: MonitorState) -> None:
        state = state if state.monitor.failure else replace(state, help_wanted=help_wanted(state))
        state = self._alerts.on(state, self._clock())
        if self._remember is not None:
            await self._remember(state, self.chains)
        self.state = state
        self._turn.set()
        self._turn = trio.Event()

    def _note(self, event: Event) -> None:
        self._lies += event.name == PeerPenalized.event_name()


def why_not(error: BarnraiseError) -> str:
    """Return why a reading failed, without the addresses that the error names: the page may have many readers."""
    if isinstance(error, DialError):
        return f"no peer could be reached at the addresses of the invite or the home ({error.reason})"
    if isinstance(error, DeadlineExceeded):
        return "the peers that were asked answered too late"
    return f"the connection to the run failed ({type(error).__name__})"


def asked_for_events(reading: RunReading) -> list[str]:
    """Return the peers whose events are asked for, those that matter most first."""
    members = [member.peer for proven in reading.best if proven for member in proven.head.members]
    known = reading.records.keys()
    here = [peer for peer in (reading.manifest.authority, *members) if peer in known]
    return [*here, *sorted(known - set(here))]
