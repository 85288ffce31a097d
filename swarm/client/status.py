"""The status of a run: one reading of its members' records and heads."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Final

import msgspec

from swarm.client.judged import JudgedStatus, ask_judged, has_judges, judged_by
from swarm.client.session import RunClient, open_client
from swarm.gossip.pairing import PeerView, group_round
from swarm.membership.completion import COMPLETE
from swarm.membership.member_record import MemberRecord
from swarm.membership.proven_heads import ProvenHead
from swarm.membership.vote_shares import InviteStatus, VoteShare, invites_of, prefixes_told, vote_shares
from swarm.protocol.head import Head, Member
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest

_ROLES: Final = ("full", "stage", "feeder", "coordinator")


class MemberStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One peer as it described itself. From `stage` on the fields are those of a pipeline."""

    peer: str
    name: str
    role: str
    version: str
    round: int | None
    """None where the peer has no state (yet), as feeders."""
    phase: str
    state_hash: str
    in_head: bool
    """Whether the peer is a member of the last commit, in a pipeline of its stage's."""
    speed: float
    """Inner steps a second."""
    loss: float | None
    val_loss: float | None
    val_round: int | None = None
    """The round of `val_loss`; None where the peer does not say."""
    steps: int
    """Inner steps of the last round that the peer has trained."""
    skipped: int
    """Of these the ones whose loss or gradient was NaN or infinite."""
    bytes_up: int
    """Since the peer started, as `bytes_down`."""
    bytes_down: int
    age_s: float
    """Seconds since the peer wrote its record."""
    stage: int
    """Where the peer is or is going; -1: no stage."""
    source: int
    """The stage that the peer came from; -1: none."""
    queue: float
    """Micro-batches that wait for the peer."""
    service_s: float
    """Seconds of work on one micro-batch."""
    rate: float
    """Micro-batches a second that were counted there lately."""
    ready_in_s: float
    """Seconds until the peer expects to be at work in `stage`."""
    client: bool = False
    """Whether no other peer can dial it, by its own word: it merges nothing."""


class StageStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One stage of a pipeline: blocks `first` to before `end`."""

    stage: int
    first: int
    end: int
    round: int | None
    """Of the head of the stage's group, as the fields up to `tokens`; None, 0 or empty if no head was found. Where the
    coordinator tells of a later round than any head that was found, the hashes are empty."""
    term: int
    state_hash: str
    head: str
    members: int
    quorum: int
    quorum_alive: bool
    tokens: int
    replicas: int
    """At work."""
    arriving: int
    """On their way."""
    queue: float | None
    """Micro-batches that wait at a replica, the mean of the replicas that have measured it; None: none has."""
    service_s: float | None
    """Seconds of a replica's work on one micro-batch, the mean as of `queue`."""
    rate: float
    """Micro-batches a second that all replicas together have counted lately."""
    phase: str
    """What most replicas do, or why the stage stands still."""


class SwarmStatus(msgspec.Struct, frozen=True, kw_only=True):
    """A run at one time.

    `round`, `state_hash` and `members` are those of the head that a majority of its members stands at; None, empty or 0
    if no such head was found. With `method` "gossip" there is no such head: `round` is the median of the members,
    `tokens` their sum. In a pipeline `round` and `tokens` are those that all stages have reached, `members` those of
    all stages, and there is no common hash.
    """

    run_id: str
    name: str
    open: bool
    rounds: int
    round: int | None
    term: int
    state_hash: str
    head: str
    members: int
    quorum: int
    quorum_alive: bool
    """Whether enough of the head's members answered to go on."""
    complete: bool
    """Whether the run's last round is made, so that no members are needed any more."""
    kept: bool
    """Whether the coordinator says that it has the last state, and serves it to who comes later."""
    method: str
    tokens: int
    val_loss: float | None
    val_round: int | None = None
    """The round of `val_loss`."""
    peers: list[MemberStatus]
    stages: list[StageStatus]
    """Empty where the model is not cut into stages."""
    shares: list[VoteShare]
    """Invites and address prefixes that hold half or more of the votes of a head."""
    guests: list[InviteStatus]
    """Who came by which invite; empty in an open run."""
    silent: list[str] = []
    """The ids of the peers that were asked where they stand and did not answer."""
    judged: list[JudgedStatus] = []
    """Peers whose updates make the loss worse, as members of the last commit say."""
    judges: int | None = None
    """How many of those members said whom they judge; None in a run without the check by loss."""


async def read_manifest(invite: Invite) -> Manifest:
    """Connect to the run and return its rules. Raises NotAdmitted, DialError if no peer answers, or ConfigError for a
    served model."""
    async with open_client(invite) as client:
        return client.training


@dataclass(frozen=True)
class RunReading:
    """One reading of a run: what its peers say of themselves, what is proved, and the status that these show."""

    at: float
    """Unix time."""
    records: Mapping[str, MemberRecord]
    best: tuple[ProvenHead | None, ...]
    """The furthest proved head of each stage; None where no peer proves one, and in a gossip run."""
    status: SwarmStatus


async def read_run(client: RunClient) -> RunReading:
    """Read the run once; takes a few seconds at most, even if peers are frozen."""
    manifest = client.training
    records = await client.members()
    silent = set[str]()
    found = await client.all_candidates(records, silent)
    best = tuple(seen[0] if seen and manifest.outer.has_common_state else None for seen in found)
    now = time.time()
    seen = picture(manifest, records, best, now, silent)
    if has_judges(manifest) and not seen.complete:
        members = [member.peer for proven in best if proven for member in proven.head.members]
        said = await ask_judged(client.host, (peer for peer in members if peer not in silent))
        seen = msgspec.structs.replace(seen, judged=judged_by(said, {*members, *records}), judges=len(said))
    return RunReading(now, records, best, seen)


def picture(
    manifest: Manifest,
    records: Mapping[str, MemberRecord],
    best: Sequence[ProvenHead | None],
    now: float,
    silent: Iterable[str] = (),
) -> SwarmStatus:
    """Return the status that `records` and each stage's `best` head show at `now`, Unix time. `silent`: the peers that
    did not answer."""
    members_of = [{member.peer for member in candidate.head.members} if candidate else set() for candidate in best]

    def in_head(peer: str, record: MemberRecord) -> bool:
        stage = 0 if manifest.stages == 1 else record.stage
        return 0 <= stage < manifest.stages and peer in members_of[stage]

    peers = [_member(peer, record, in_head(peer, record), now) for peer, record in records.items()]
    peers.sort(key=lambda status: (_ROLES.index(status.role), status.stage, status.name, status.peer))
    # The lowest of the latest: a peer goes on publishing an old measurement.
    measured = [(r.val_round, r.round, -r.val_loss) for r in records.values() if r.val_loss is not None]
    val_round, _, val_loss = max(measured, default=(-1, -1, 0.0))
    authority = records.get(manifest.authority)
    stages = [
        _stage(manifest, stage, records.values(), candidate, authority, now) for stage, candidate in enumerate(best)
    ]
    heads = [candidate.head for candidate in best if candidate]
    head: Head | None = heads[0] if manifest.stages == 1 and heads else None
    rounds = [stage.round for stage in stages if stage.round is not None]
    round_ = min(rounds) if len(rounds) == len(stages) else None
    members, tokens = sum(stage.members for stage in stages), min(stage.tokens for stage in stages)
    if not manifest.outer.has_common_state:
        full = {peer: PeerView(record.round) for peer, record in records.items() if record.role == "full"}
        round_, members, tokens = group_round(full), len(full), sum(records[peer].tokens for peer in full)
    return SwarmStatus(
        run_id=manifest.run_id,
        name=manifest.run.name,
        open=manifest.run.open,
        rounds=manifest.run.rounds,
        round=round_,
        term=max(stage.term for stage in stages),
        state_hash=stages[0].state_hash if head else "",
        head=stages[0].head if head else "",
        members=members,
        quorum=head.quorum if head else 0,
        quorum_alive=all(stage.quorum_alive for stage in stages),
        complete=_is_complete(manifest, round_, list(records.values())),
        kept=authority is not None and authority.phase == COMPLETE,
        method=str(manifest.outer.__struct_config__.tag),
        tokens=tokens,
        val_loss=-val_loss if measured else None,
        val_round=_known(val_round),
        peers=peers,
        stages=stages if manifest.stages > 1 else [],
        shares=shares_of(manifest, best, records),
        guests=invites_of(heads, records),
        silent=sorted(silent),
    )


def shares_of(
    manifest: Manifest, best: Sequence[ProvenHead | None], records: Mapping[str, MemberRecord]
) -> list[VoteShare]:
    """Return which invites and address prefixes hold half or more of the votes of each stage's `best` head."""
    prefixes, found = prefixes_told(records), list[VoteShare]()
    for stage, proven in enumerate(best):
        if proven is not None:
            found += vote_shares(manifest, proven.head, prefixes, stage if manifest.stages > 1 else None)
    return found


def _is_complete(manifest: Manifest, round_: int | None, records: Sequence[MemberRecord]) -> bool:
    """`round_`: where the run stands. A gossip run is complete once each peer of it has made its own last round."""
    rounds = manifest.run.rounds
    if not manifest.outer.has_common_state:
        trained = [record.round for record in records if record.role == "full"]
        if not trained:  # the coordinator has seen all of them leave with their last round
            return any(record.role == "coordinator" and record.phase == COMPLETE for record in records)
        return 0 < rounds <= min(trained)
    return 0 < rounds <= (-1 if round_ is None else round_)


def _known(number: int) -> int | None:
    return number if number >= 0 else None


def _member(peer: str, record: MemberRecord, in_head: bool, now: float) -> MemberStatus:
    return MemberStatus(
        peer=peer,
        name=record.name,
        role=record.role,
        version=record.version,
        round=_known(record.round),
        phase=record.phase,
        state_hash=record.state_hash.hex(),
        in_head=in_head,
        speed=record.speed,
        loss=record.loss,
        val_loss=record.val_loss,
        val_round=_known(record.val_round),
        steps=record.steps,
        skipped=record.skipped,
        bytes_up=record.bytes_up,
        bytes_down=record.bytes_down,
        age_s=max(0.0, round(now - record.at, 1)),
        stage=record.stage,
        source=record.source,
        queue=record.queue,
        service_s=record.service_s,
        rate=record.rate,
        ready_in_s=round(record.ready_at - now, 1) if record.moving(now) else 0.0,
        client=record.client,
    )


def _stage(
    manifest: Manifest,
    stage: int,
    records: Iterable[MemberRecord],
    best: ProvenHead | None,
    authority: MemberRecord | None,
    now: float,
) -> StageStatus:
    """Return the status of one stage.

    The record of the `authority` has the last round that all stages have committed. Its head of a stage without
    replicas is the one that began the term, so the record counts there.
    """
    first, end = manifest.cuts[stage]
    head = best.head if best else None
    there = [record for record in records if record.stage == stage]
    at_work = [record for record in there if not record.moving(now)]
    measured = [record for record in at_work if record.service_s > 0]
    members = set(head.members) if head else set[Member]()
    alive = bool(best and head and len(members.intersection(best.near)) >= head.quorum)
    at_least = authority if not at_work else None
    older = head is not None and at_least is not None and head.round < at_least.round  # then its hashes are another's
    return StageStatus(
        stage=stage,
        first=first,
        end=end,
        round=max(head.round, at_least.round if at_least else 0) if head else None,
        term=head.term if head else 0,
        state_hash=head.state_hash.hex() if head and not older else "",
        head=head.hash.hex() if head and not older else "",
        members=len(members),
        quorum=head.quorum if head else 0,
        quorum_alive=alive,
        tokens=max(head.tokens, at_least.tokens if at_least else 0) if head else 0,
        replicas=len(at_work),
        arriving=len(there) - len(at_work),
        queue=fmean(record.queue for record in measured) if measured else None,
        service_s=fmean(record.service_s for record in measured) if measured else None,
        rate=sum(record.rate for record in at_work),
        phase=_phase(at_work, there, alive or head is None, now),
    )


def _phase(at_work: Sequence[MemberRecord], there: Sequence[MemberRecord], alive: bool, now: float) -> str:
    """Return what most replicas `at_work` do, or why the stage stands still."""
    if at_work:
        usual = Counter(record.phase for record in at_work).most_common(1)[0][0]
        return usual if alive else "waiting for a majority"
    soonest_s = min((record.ready_at - now for record in there), default=None)
    return "not served" if soonest_s is None else f"ready in {soonest_s:.0f} s"
