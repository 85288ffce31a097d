"""What the monitor shows, as plain values: the JSON of `/api/v1/state`, which the page and `peer top` draw.

Three kinds of knowledge are kept apart. `facts` follow from proved heads and the signed manifest. `seen` is what this
monitor met with itself: who answered, when a head was new to it. `claims` are what peers say of themselves; nothing
checks them.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from swarm.membership.vote_shares import InviteStatus, VoteShare
from swarm.status.data_set import DataSetState
from swarm.status.judged import JudgedStatus

Level = Literal["good", "edge", "waiting", "bad", "over", "unknown"]
Basis = Literal["facts", "seen", "claims"]
Severity = Literal["critical", "warning", "info"]
Link = Literal["direct", "relay", "unknown"]
Outcome = Literal["told", "silent", "garbage", "not asked"]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """How the run or model is, in one line."""

    level: Level
    word: str
    reason: str
    remedy: str = ""
    """What to do; empty where nothing is wrong."""
    basis: tuple[Basis, ...]
    """What the verdict rests on."""


class Alert(msgspec.Struct, frozen=True, kw_only=True):
    """Something that stops the run, or will, or should be known, and has lasted for its time."""

    name: str
    """Of the rule, of a closed set."""
    subject: str = ""
    """What it is about where a rule may speak of several: a peer, a stage, blocks."""
    severity: Severity
    text: str
    remedy: str
    basis: tuple[Basis, ...]
    since: float = 0.0
    """When the monitor first saw it."""


class StageFacts(msgspec.Struct, frozen=True, kw_only=True):
    """Of the furthest proved head of a stage's group."""

    round: int
    term: int
    tokens: int
    state_hash: str
    members: int
    quorum: int
    absent: int
    """Members without a contribution to the last round."""
    learners: int


class StageSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What the monitor met with at a stage."""

    answering: int
    """Members that answered from near that head."""
    margin: int | None
    """How many of these may fall silent before rounds stop; negative: that many are missing. None without members."""
    commit_age_s: float | None
    """Seconds since the head was new to this monitor: at least so old is the last commit."""
    round_s: float | None
    """Mean seconds of the last rounds, of commits that came while the monitor looked; None before two did."""


class StageClaims(msgspec.Struct, frozen=True, kw_only=True):
    """What the records of a stage's replicas add up to."""

    replicas: int
    arriving: int
    rate: float
    """Micro-batches a second."""
    queue: float | None
    phase: str
    capacity: float = 0.0
    """Micro-batches a second that the replicas could work on, by the time that each takes for one; 0: not known."""


class StageState(msgspec.Struct, frozen=True, kw_only=True):
    """One stage, or the whole model where it is not cut: blocks `first` to before `end`."""

    stage: int
    first: int
    end: int
    facts: StageFacts | None
    seen: StageSeen
    claims: StageClaims


class BlockRow(msgspec.Struct, frozen=True, kw_only=True):
    """Blocks of a served model, `first` to before `end`, that have the same servers, as these claim."""

    first: int
    end: int
    servers: int
    arriving: int
    leaving: int
    peers: tuple[str, ...]


class MemberFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the heads of the last rounds say of a peer."""

    membership: Literal["member", "learner", "none"]
    merged: int
    """Rounds, of those that the monitor knows, that merged a contribution of the peer."""
    missed: int
    """Rounds, of those, for which the peer was a member or learner and contributed nothing."""


class MemberSeen(msgspec.Struct, frozen=True, kw_only=True):
    """What the monitor met with when it asked the peer."""

    answers: bool
    """Whether the peer answered, at the last reading, from near the last head."""
    events: Outcome
    """What came of asking for its events."""
    link: Link
    """By the addresses that it announces."""
    relay: str = ""
    """The peer that relays to it, if it announces no way but over that one."""


class MemberClaims(msgspec.Struct, frozen=True, kw_only=True):
    """What a peer says of itself. Fields that do not apply to it are None."""

    name: str
    role: str
    version: str
    phase: str
    age_s: float
    """Negative where the record is of the monitor's future: one of both clocks is wrong."""
    bytes_up: int
    bytes_down: int
    up_bytes_s: float | None = None
    """Between the last two records, as `down_bytes_s`."""
    down_bytes_s: float | None = None
    round: int | None = None
    stage: int | None = None
    """Where it is or is going."""
    source: int | None = None
    """The stage that it came from."""
    ready_in_s: float = 0.0
    """Seconds until it expects to be at work there; of a server: to serve its blocks."""
    state_hash: str = ""
    client: bool = False
    """Whether no other peer can dial it: it merges nothing."""
    speed: float | None = None
    """Inner steps a second; at a stage micro-batches a second."""
    queue: float | None = None
    """Micro-batches that wait for it."""
    steps: int = 0
    """Inner steps of the last round that it has trained."""
    skipped: int = 0
    """Of these the ones whose loss or gradient was NaN or infinite."""
    service_s: float | None = None
    """Seconds of its own work on one micro-batch."""
    loss: float | None = None
    val_loss: float | None = None
    val_round: int | None = None
    """The round of `val_loss`."""
    first: int | None = None
    """Of a server: its blocks, to before `end`."""
    end: int | None = None
    sessions: int | None = None
    kv_used: float | None = None
    """The share of its room for keys and values that is taken."""
    step_ms: float | None = None
    waiting_tokens: int = 0
    tokens: int = 0
    """Served since it started."""
    uplink_bytes_s: float = 0.0
    wire: tuple[str, ...] = ()
    """The types in which it takes hidden states."""
    pinned: bool = False
    commits: tuple[int, ...] = ()
    """Of a training run: the rounds of the commits that it serves, newest first."""


class MemberTold(msgspec.Struct, frozen=True, kw_only=True):
    """What was told of a peer in the last ten minutes."""

    refused_by: int = 0
    """Peers that say that they refuse something that it sent."""
    refusal: str = ""
    """The reason that one of them gives."""
    failed_saves: int = 0
    """Its own words, as those below."""
    lost_workers: int = 0
    left_out: int = 0
    """Peers for which the fullest roster that it saw had no room."""


class MemberState(msgspec.Struct, frozen=True, kw_only=True):
    """One peer. It has no claims where it publishes no record, so it is away."""

    peer: str
    facts: MemberFacts
    seen: MemberSeen
    claims: MemberClaims | None
    told: MemberTold = MemberTold()


class RoundFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a head says of the round that made it."""

    took_part: tuple[str, ...]
    absent: tuple[str, ...]
    joined: tuple[str, ...]
    left: tuple[str, ...]
    discarded: int
    """Attempts before the one that was committed."""
    members: int
    tokens: int


class RoundClaims(msgspec.Struct, frozen=True, kw_only=True):
    """What members told of a round."""

    last: str
    """The peer that says it ended training last; empty where fewer than two said."""
    behind_s: float
    """Seconds between the first and the last of them, each by its own clock."""
    failures: tuple[str, ...]
    """Why attempts failed, in the words of their leaders."""


class RoundState(msgspec.Struct, frozen=True, kw_only=True):
    """One commit, newest first. Where a term begins (`starts_term`) no round was made."""

    stage: int
    round: int
    term: int
    starts_term: bool
    seen_at: float | None
    """When the head was new to this monitor; None for older ones, which heads do not date."""
    facts: RoundFacts
    claims: RoundClaims


class LossPoint(msgspec.Struct, frozen=True, kw_only=True):
    """The losses that members claim for a round, in nats a token."""

    round: int
    train: float | None
    """The median of the members that told one."""
    peers: int
    held_out: float | None


class LogLine(msgspec.Struct, frozen=True, kw_only=True):
    """An event in words, newest first, as peers claim it."""

    at: float
    text: str
    tellers: tuple[str, ...]


class KeptHead(msgspec.Struct, frozen=True, kw_only=True):
    """The last head of a stage that a home keeps with its proof."""

    stage: int
    round: int
    term: int
    head: str
    state_hash: str
    tokens: int
    members: tuple[str, ...]
    """Their ids."""
    at: float | None
    """When this home's peer came to it, by its log; None where the log does not say."""


class KeptHome(msgspec.Struct, frozen=True, kw_only=True):
    """What a home on this machine keeps of a run or served model, while no peer answers: of the past, by Unix times."""

    kind: Literal["run", "model"]
    run_id: str
    name: str
    open: bool
    rounds: int = 0
    """The run's last round; 0: none is set."""
    at: float
    """When the home was read."""
    written_at: float | None
    """When its peer wrote its last event; None without one."""
    in_use: bool
    """Whether a process runs from it."""
    round: int | None = None
    """The furthest round of `heads`; in a run without common heads, the peer's own."""
    heads: tuple[KeptHead, ...] = ()
    """Of the stages of which it has one, proved by the signatures beside it."""
    losses: tuple[LossPoint, ...] = ()
    """By the home's log: of the last rounds, and the last held-out loss."""
    log: tuple[LogLine, ...] = ()
    names: dict[str, str] = {}
    """The name that each peer claimed."""


class Watch(msgspec.Struct, frozen=True, kw_only=True):
    """How the monitor itself does."""

    started_at: float
    readings: int
    failed: int
    last_success: float | None
    reading_s: float | None
    failure: str = ""
    """Why the last reading failed; empty if it did not."""
    members_left_out: int = 0
    """Records beyond those that are shown."""
    history_complete: bool = False
    """Whether the rounds that are shown reach back to the first, or to the bound on them."""
    lies: int = 0
    """Answers that were refused as false."""


class MonitorState(msgspec.Struct, frozen=True, kw_only=True):
    """The whole state at one time."""

    kind: Literal["run", "model", "unknown"]
    at: float
    run_id: str
    name: str
    open: bool
    method: str = ""
    mode: str = ""
    """How the run agrees: `witness` or `required`; empty where there is no common state."""
    codec: str = ""
    compute_s_max: float = 0.0
    """What a round's work may take, by the manifest."""
    coordinator_here: bool = True
    """Whether the coordinator publishes a record, or answers from near a head of which it is a member."""
    failure: str = ""
    """Why the last attempt failed, as its leader says; empty once its round is committed."""
    rounds_planned: int = 0
    """The run's last round; 0: none is set."""
    round: int | None = None
    """What all stages have reached, as `tokens`: by their heads, for a stage without replicas by the coordinator's
    word. Of a gossip run the median of its peers' rounds, and the sum of their tokens."""
    tokens: int = 0
    val_loss: float | None = None
    """The latest that a peer claims."""
    val_round: int | None = None
    """The round of `val_loss`."""
    blocks_total: int = 0
    dtype: str = ""
    """Of a served model's weights."""
    parts: int = 0
    """Of a served model's checkpoint."""
    verdict: Verdict
    stages: tuple[StageState, ...] = ()
    blocks: tuple[BlockRow, ...] = ()
    troubles: tuple[str, ...] = ()
    """Why a served model, or the newest commit of a run that has servers, takes no new session."""
    members: tuple[MemberState, ...] = ()
    servers: tuple[MemberState, ...] = ()
    """Of a run's commits; of a served model they are its members."""
    served_round: int | None = None
    """That of the commit that new answers get: the newest all of whose blocks are served."""
    silent: tuple[str, ...] = ()
    """The peers that were asked where they stand and did not answer."""
    judged: tuple[JudgedStatus, ...] = ()
    """Peers whose updates make the loss worse, as members of the last commit say."""
    judges: int | None = None
    """How many of those members said whom they judge; None in a run without the check by loss."""
    rounds: tuple[RoundState, ...] = ()
    loss: tuple[LossPoint, ...] = ()
    log: tuple[LogLine, ...] = ()
    names: dict[str, str] = {}
    """The name that each peer claims, also of peers that have left."""
    cautions: tuple[str, ...] = ()
    """Invites and address prefixes that hold half or more of the votes of a head."""
    shares: tuple[VoteShare, ...] = ()
    """As the cautions, also where the invite or prefix is the only one. Empty where others may read, as `guests`."""
    guests: tuple[InviteStatus, ...] = ()
    """Who came by which invite."""
    alerts: tuple[Alert, ...] = ()
    """The gravest first."""
    help_wanted: str = ""
    """Where one more machine would help most, in words; empty where that is not known."""
    home: KeptHome | None = None
    """What the home keeps, while the run was not reached; None once it was: then nothing here is of the past."""
    data_set: DataSetState | None = None
    monitor: Watch
