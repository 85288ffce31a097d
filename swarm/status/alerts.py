"""What stands still, what breaks next and what should be known: pure rules from the state to conditions with a remedy.

A condition becomes an alert once it has held for its `after_s`, and is one until it is gone.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import islice
from statistics import fmean, median
from typing import Final

from msgspec import convert
from msgspec.structs import asdict, replace

from peer.catalogue.groups import RosterFull
from swarm.status.model_state import blocks_served
from swarm.status.state import Alert, MemberState, MonitorState, RoundState, StageState
from swarm.status.verdict import AWAY_S, Condition, coordinator_away, page_missing, quorum, replicas, run_stalled

ROUNDS: Final = 20
"""The last rounds that rules about members look at, and about the loss."""
RELAYED_MIN: Final = 3
ABSENT_MAX: Final = 3
LAST_MIN: Final = 6
"""Rounds whose last peer must be known before one is called slow."""
BEHIND_SHARE: Final = 0.1
"""Of a round: who ends it less behind than that delays no other one."""
SLOW_TIMES: Final = 2.0
"""What the other replicas of a stage take for a micro-batch: who takes longer is called slow."""
SLOW_S: Final = 10.0
SPIKE_NATS: Final = 0.1
SPIKE_ROUNDS: Final = 10
CLOCK_S: Final = 60.0
BLIND_S: Final = 60.0
GRAVITY: Final = {"critical": 0, "warning": 1, "info": 2}
ALERTS_MAX: Final = 100
_SLOWED: Final = "`peer doctor` on that machine says what slows it"


Rule = Callable[[MonitorState], Iterator[Condition]]
_warning = partial(Condition, severity="warning", basis=("claims",))
_info = partial(Condition, severity="info", basis=("claims",))


class Alerts:
    """The conditions that hold, and since when."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str], float] = {}

    def on(self, state: MonitorState, now: float) -> MonitorState:
        """Return the state with its alerts. Where the last reading failed, those of the one before stand: nothing says
        that they are over."""
        unread = bool(state.monitor.failure)
        found = {(one.name, one.subject): one for one in (_blindness(state, now) if unread else _conditions(state))}
        lasting = [alert for alert in state.alerts if unread and (alert.name, alert.subject) not in found]
        before = self._since
        self._since = {key: before.get(key, now) for key in (*found, *(before if unread else ()))}
        held = ((one, self._since[key]) for key, one in found.items())
        due = [convert(asdict(one) | {"since": at}, Alert) for one, at in held if now - at >= one.after_s]
        return replace(state, alerts=tuple(sorted((*due, *lasting), key=_order)[:ALERTS_MAX]))


def _order(alert: Alert) -> tuple[int, float, str, str]:
    return GRAVITY[alert.severity], alert.since, alert.name, alert.subject


def _conditions(state: MonitorState) -> list[Condition]:
    """Return all that the rules find in a state that was read just now."""
    if state.verdict.level == "over":
        return []
    return [found for rule in RULES for found in rule(state)]


# -- members -----------------------------------------------------------------------------------------------------------


def _name(state: MonitorState, peer: str) -> str:
    return state.names.get(peer) or f"…{peer[-6:]}"


def _relay_heavy(state: MonitorState) -> Iterator[Condition]:
    here = [member for member in state.members if member.claims is not None]
    through = Counter(member.seen.relay for member in here if member.seen.relay)
    for relay, count in through.most_common(1):
        if count >= RELAYED_MIN and 2 * count > len(here):
            yield _warning(
                name="relay_heavy",
                subject=relay,
                text=f"{count} of {len(here)} peers can be reached through one relay only ({_name(state, relay)})",
                remedy="start another `peer relay`, or open a port at some of them (`peer doctor` says how)",
                after_s=60.0,
            )


def _by_stage(state: MonitorState, stage: StageState) -> list[RoundState]:
    made = (line for line in state.rounds if line.stage == stage.stage and not line.starts_term)
    return list(islice(made, ROUNDS))


def _often_last(state: MonitorState) -> Iterator[Condition]:
    for stage in state.stages:
        known = [line.claims for line in _by_stage(state, stage) if line.claims.last]
        round_s = stage.seen.round_s
        if len(known) < LAST_MIN or round_s is None:
            continue
        peer, times = Counter(line.last for line in known).most_common(1)[0]
        behind_s = fmean(line.behind_s for line in known if line.last == peer)
        if 2 * times > len(known) and behind_s > BEHIND_SHARE * round_s:
            yield _info(
                name="often_last",
                subject=peer,
                text=f"{_name(state, peer)} ended its training last in {times} of {len(known)} rounds, on average"
                f" {behind_s:.0f} s after the first",
                remedy=f"{_SLOWED}; after some rounds it is given fewer steps",
            )


def _slow_replica(state: MonitorState) -> Iterator[Condition]:
    for stage in state.stages if len(state.stages) > 1 else ():
        here = ((member.peer, member.claims) for member in state.members if member.claims is not None)
        taken = {peer: claims.service_s for peer, claims in here if claims.stage == stage.stage and claims.service_s}
        for peer, service_s in taken.items():
            others = [seconds for other, seconds in taken.items() if other != peer]
            if others and service_s > SLOW_TIMES * median(others):
                yield _info(
                    name="slow_replica",
                    subject=peer,
                    text=f"{_name(state, peer)} takes {service_s:.2g} s for a micro-batch, where the other replicas of"
                    f" stage {stage.stage} take {median(others):.2g} s",
                    remedy=f"{_SLOWED}; meanwhile it is given less to do",
                    after_s=SLOW_S,
                )


def _often_absent(state: MonitorState) -> Iterator[Condition]:
    members = {member.peer for member in state.members if member.facts.membership == "member"}
    for stage in state.stages:
        lines = _by_stage(state, stage)
        absent = Counter(peer for line in lines for peer in line.facts.absent if peer in members)
        for peer, times in absent.items():
            if times > ABSENT_MAX:
                yield Condition(
                    name="often_absent",
                    subject=peer,
                    severity="warning",
                    text=f"nothing of {_name(state, peer)} was merged in {times} of the last {len(lines)} rounds",
                    remedy="see that machine's terminal: its updates come too late, or are refused",
                    basis=("facts",),
                )


def _told_of_members(state: MonitorState) -> Iterator[Condition]:
    for member in state.members:
        yield from _told_of(member, _name(state, member.peer))


def _told_of(member: MemberState, name: str) -> Iterator[Condition]:
    told = member.told
    if told.refused_by > 1:
        yield _warning(
            name="peer_refused",
            subject=member.peer,
            text=f"{told.refused_by} peers refuse what {name} sent: {told.refusal}",
            remedy="if that goes on, the owner can ban it: `peer coordinate --ban`, see docs/run/security.md",
        )
    if told.failed_saves:
        yield Condition(
            name="cannot_save",
            subject=member.peer,
            severity="critical",
            text=f"{name} could not save its state: what it has done since is lost if it stops",
            remedy="free space on the disk of its home",
            basis=("claims",),
        )
    if told.lost_workers > 2:
        yield _warning(
            name="worker_dies",
            subject=member.peer,
            text=f"{name} lost its worker process {told.lost_workers} times in ten minutes",
            remedy="see its log: mostly memory runs out; `peer doctor` there says what fits",
        )
    if member.claims is not None and member.claims.age_s < -CLOCK_S:
        yield Condition(
            name="clock_skew",
            subject=member.peer,
            severity="warning",
            text=f"the clock of {name}, or of this machine, is {-member.claims.age_s:.0f} s wrong",
            remedy="set both by NTP (`timedatectl set-ntp true`)",
            basis=("claims", "seen"),
        )


def _roster_full(state: MonitorState) -> Iterator[Condition]:
    most = max((member.told.left_out for member in state.members), default=0)
    if most > 0:
        yield _warning(
            name=RosterFull.event_name(),
            text=f"a round had no room for {most} of the updates, whose peers wait for their turn",
            remedy="give these another stage or run; create the next run with fewer [run] max_peers, or more stages",
        )


def _versions(state: MonitorState) -> Iterator[Condition]:
    found = Counter(member.claims.version for member in state.members if member.claims is not None)
    if len(found) > 1:
        told = ", ".join(f"{count} with {version}" for version, count in found.most_common(4))
        yield _info(
            name="version_skew",
            text=f"peers run different versions: {told}",
            remedy="upgrade barnraise on the older ones, one after the other",
            after_s=AWAY_S,  # while they are upgraded one after the other, they do
        )


# -- the loss ----------------------------------------------------------------------------------------------------------


def _loss(state: MonitorState) -> Iterator[Condition]:
    held = [(point.round, point.held_out) for point in state.loss if point.held_out is not None]
    if len(held) > 1:
        number, last = held[-1]
        best = min(value for _, value in held[-1 - SPIKE_ROUNDS : -1])
        if last > best + SPIKE_NATS:
            yield _warning(
                name="loss_spike",
                text=f"the held-out loss of round {number} is {last:.3f}, where {best:.3f} was reached before",
                remedy="wait for some rounds; if it stays, lower the learning rate, or begin again from a saved state",
            )
    train = [point.train for point in state.loss if point.train is not None]
    if len(train) >= 3 * ROUNDS:
        first, middle, last = (fmean(train[-place * ROUNDS :][:ROUNDS]) for place in (3, 2, 1))
        if first <= middle <= last:
            yield _info(
                name="loss_flat",
                text=f"the loss has not fallen for {2 * ROUNDS} rounds (it is {last:.3f}, as the members claim)",
                remedy="see whether the learning rate has run out, or more data is needed; or end the run here",
            )


# -- the monitor itself ------------------------------------------------------------------------------------------------


def _blindness(state: MonitorState, now: float) -> list[Condition]:
    """Return whether the monitor itself reads nothing any more."""
    last = state.monitor.last_success
    if last is None or now - last <= BLIND_S:
        return []
    return [
        Condition(
            name="monitor_blind",
            severity="warning",
            text=f"this monitor has read nothing for {now - last:.0f} s: what it shows is old",
            remedy="check this machine's connection; it tries again by itself",
            basis=("seen",),
        )
    ]


RULES: Final[tuple[Rule, ...]] = (
    run_stalled,
    quorum,
    replicas,
    coordinator_away,
    page_missing,
    blocks_served,
    _relay_heavy,
    _often_absent,
    _told_of_members,
    _roster_full,
    _often_last,
    _slow_replica,
    _loss,
    _versions,
)
