"""One reading of a run: its members' records and proved heads, and how far they show that it is."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from swarm.client.session import RunClient
from swarm.gossip.pairing import PeerView, group_round
from swarm.inference.record import ServerRecord
from swarm.membership.completion import COMPLETE
from swarm.membership.member_record import MemberRecord
from swarm.membership.proven_heads import ProvenHead
from swarm.membership.vote_shares import VoteShare, prefixes_told, vote_shares
from swarm.pages.holdings import HOLDINGS, HoldingsRecord, holdings_key
from swarm.run.manifest import Manifest
from swarm.status.judged import JudgedStatus, ask_judged, has_judges, judged_by


@dataclass(frozen=True)
class RunReading:
    """One reading of a run: what its peers say of themselves, and what is proved."""

    manifest: Manifest
    at: float
    """Unix time."""
    records: Mapping[str, MemberRecord]
    best: tuple[ProvenHead | None, ...]
    """The furthest proved head of each stage; None where no peer proves one, and in a gossip run."""
    silent: tuple[str, ...] = ()
    """The peers that were asked where they stand and did not answer."""
    judged: tuple[JudgedStatus, ...] = ()
    """Peers whose updates make the loss worse, as members of the last commit say."""
    judges: int | None = None
    """How many of those members said whom they judge; None in a run without the check by loss, and once it is over."""
    servers: Mapping[str, ServerRecord] = field(default_factory=dict)
    """The records of those that serve the run's commits."""
    holdings: Mapping[str, HoldingsRecord] = field(default_factory=dict)
    """The pages of the data set that each peer keeps, as it says."""

    @property
    def answering(self) -> set[str]:
        """The peers that answered from near a stage's last head."""
        return {member.peer for proven in self.best if proven for member in proven.near}

    @property
    def full(self) -> dict[str, MemberRecord]:
        """The records of those that train a whole model."""
        return {peer: record for peer, record in self.records.items() if record.role == "full"}

    @property
    def progress(self) -> tuple[int | None, int]:
        """The round, None if it is not known, and the merged tokens that all stages have reached. A gossip run has the
        median of its peers' rounds, and the sum of their tokens."""
        if not self.manifest.outer.has_common_state:
            peers = {peer: PeerView(record.round) for peer, record in self.full.items()}
            return group_round(peers), sum(record.tokens for record in self.full.values())
        stages = [self._reached(stage, proven) for stage, proven in enumerate(self.best)]
        rounds = [reached[0] for reached in stages if reached is not None]
        least = min((reached[1] if reached is not None else 0 for reached in stages), default=0)
        return min(rounds) if len(rounds) == len(stages) else None, least

    @property
    def complete(self) -> bool:
        """Whether the run's last round is made, so that no members are needed any more. A gossip run is complete once
        each peer of it has made its own last round."""
        rounds = self.manifest.run.rounds
        if self.manifest.outer.has_common_state:
            reached = self.progress[0]
            return 0 < rounds <= (-1 if reached is None else reached)
        if not self.full:  # the coordinator has seen all of them leave with their last round
            return any(record.role == "coordinator" and record.phase == COMPLETE for record in self.records.values())
        return 0 < rounds <= min(record.round for record in self.full.values())

    @property
    def kept(self) -> bool:
        """Whether the coordinator says that it has the last state, and serves it to who comes later."""
        authority = self.records.get(self.manifest.authority)
        return authority is not None and authority.phase == COMPLETE

    @property
    def held_out(self) -> tuple[float | None, int | None]:
        """The held-out loss and its round, as far as they are known: the lowest of the latest, since a peer goes on
        publishing an old measurement."""
        told = [(r.val_round, r.round, -r.val_loss) for r in self.records.values() if r.val_loss is not None]
        if not told:
            return None, None
        number, _, loss = max(told)
        return -loss, number if number >= 0 else None

    @property
    def shares(self) -> list[VoteShare]:
        """Which invites and address prefixes hold half or more of the votes of each stage's head."""
        prefixes, found = prefixes_told(self.records), list[VoteShare]()
        for stage, proven in enumerate(self.best):
            if proven is not None:
                found += vote_shares(self.manifest, proven.head, prefixes, stage if self.manifest.stages > 1 else None)
        return found

    def _reached(self, stage: int, proven: ProvenHead | None) -> tuple[int, int] | None:
        """Return the round and tokens of a stage. The record of the authority has the last round that all stages have
        committed. Its head of a stage without replicas is the one that began the term, so the record counts there."""
        if proven is None:
            return None
        at_work = any(record.stage == stage and not record.moving(self.at) for record in self.records.values())
        authority = self.records.get(self.manifest.authority)
        head = proven.head
        if at_work or authority is None:
            return head.round, head.tokens
        return max(head.round, authority.round), max(head.tokens, authority.tokens)


async def read_run(client: RunClient, servers: Mapping[str, ServerRecord] | None = None) -> RunReading:
    """Read the run once; takes a few seconds at most, even if peers are frozen. `servers`: their records."""
    manifest = client.training
    records = await client.members()
    silent = set[str]()
    found = await client.all_candidates(records, silent)
    best = tuple(seen[0] if seen and manifest.outer.has_common_state else None for seen in found)
    pages = await _holdings(client) if manifest.data.pages is not None else {}
    reading = RunReading(
        manifest, time.time(), records, best, tuple(sorted(silent)), servers=servers or {}, holdings=pages
    )
    if not has_judges(manifest) or reading.complete:
        return reading
    members = [member.peer for proven in best if proven for member in proven.head.members]
    said = await ask_judged(client.host, (peer for peer in members if peer not in silent))
    return replace(reading, judged=tuple(judged_by(said, {*members, *records})), judges=len(said))


async def _holdings(client: RunClient) -> dict[str, HoldingsRecord]:
    entries = await client.node.get(HOLDINGS, holdings_key(client.manifest.run_id))
    return {peer: entry.value for peer, entry in entries.items()}
