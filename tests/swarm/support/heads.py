"""Heads and contributions for tests that need no agreement to have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec

from peer.identity import Signed, open_body
from swarm.protocol.head import Head, Member
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution, WorkPlan, check_contribution, next_ledger
from swarm.protocol.round_schedule import RoundSchedule


def regrouped(head: Head, members: Iterable[Member], term: int) -> Head:
    """The first head of a term over the state of `head`."""
    return msgspec.structs.replace(head, term=term, previous=head.hash, members=tuple(sorted(members)))


def open_contribution(signed: Signed, plan: WorkPlan, slices: int, head: Head, schedule: RoundSchedule) -> Contribution:
    """Open and check a contribution, as `Succession.contribution` does."""
    body = open_body(signed, CONTRIBUTION_KIND, Contribution)
    check_contribution(body, plan, slices, head, schedule)
    return body


def committed(
    head: Head,
    plan: WorkPlan,
    merged: Sequence[Contribution],
    everyone: Sequence[Contribution],
    schedule: RoundSchedule,
) -> Head:
    """The head after a commit, as far as samples go."""
    ledger = next_ledger(head, plan, merged, everyone, schedule)
    return msgspec.structs.replace(head, round=head.round + 1, previous=head.hash, ledger=ledger)
