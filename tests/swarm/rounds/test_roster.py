"""Which rosters members accept if there is nothing to merge."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from peer.errors import RoundDiscarded
from peer.identity import Identity, sign_body
from swarm.protocol.head import Member, genesis
from swarm.protocol.plan import CONTRIBUTION_KIND, PLAN_KIND, Contribution, Roster, make_plan
from swarm.rounds.roster import check_roster
from tests.swarm.pipeline.test_stage_groups import LATER


class Weights:
    """A strategy's weights if no member has done any work."""

    def weights(self, tokens: list[int], norms: list[float]) -> tuple[float, ...]:
        assert not tokens and not norms
        return ()


@pytest.mark.parametrize(
    ("dry", "came", "merges"),
    [(True, 3, True), (True, 2, False), (False, 3, False)],
    ids=["nothing-left", "a-contribution-is-missing", "work-may-come"],
)
def test_an_empty_merge_needs_a_run_without_work_left(dry: bool, came: int, merges: bool) -> None:
    identities = sorted((Identity.generate() for _ in range(3)), key=lambda identity: identity.peer_id)
    members = tuple(Member(identity.peer_id, "s") for identity in identities)
    head = genesis("run", b"s0" * 16).regrouped(members, 1)
    plan = make_plan(head, 0, dict.fromkeys(members, 1.0), LATER)
    bodies = [Contribution(head.hash, plan.hash, member, 0, 0, 0.0, (), ()) for member in members]
    signed = [sign_body(identity, CONTRIBUTION_KIND, body) for identity, body in zip(identities, bodies, strict=True)]
    roster = Roster(head.hash, plan.hash, 0, tuple(signed[:came]), (0,))
    trainer = SimpleNamespace(has_run_dry=lambda number: dry and number == head.round + 1)
    context: Any = SimpleNamespace(schedule=LATER, trainer=trainer, state=SimpleNamespace(strategy=Weights()))
    coding: Any = SimpleNamespace(count=1)
    signed_plan = sign_body(identities[0], PLAN_KIND, plan)
    if merges:
        merge = check_roster(context, head, coding, roster, plan, signed_plan)
        assert merge.merged() == [] and [body.member for body in merge.contributors] == list(members)
    else:
        with pytest.raises(RoundDiscarded, match="no contributor"):
            check_roster(context, head, coding, roster, plan, signed_plan)
