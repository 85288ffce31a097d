"""The coordinator's terminal: one group, or one a stage of a pipeline."""

from __future__ import annotations

from typing import Any

import pytest

from cli.coordinate import _farewell
from cli.views.progress import Progress
from tests.cli.views.test_pipeline_views import committed, shown, told

HOME = "coordinator"


def coordinator_view(stages: int) -> Progress:
    progress = Progress("coordinator")
    tell(progress, "run_entered", name="big", role="coordinator", rounds=9, stages=stages)
    return progress


def tell(progress: Progress, event: str, **fields: Any) -> None:
    progress.apply(HOME, event, 1.0, fields)


def lines_of(progress: Progress) -> list[list[str]]:
    """The words of each line of the table."""
    return [line.split() for line in shown(progress).splitlines() if line.split()[:1] and line.split()[0].isdigit()]


def test_each_stage_has_a_line_and_is_named_in_notes() -> None:
    progress = coordinator_view(2)
    assert lines_of(progress) == [
        ["0", "0", "0", "waiting", "for", "peers"],
        ["1", "0", "0", "waiting", "for", "peers"],
    ]
    tell(progress, "regrouped", stage=1, term=1, round=0, members=2)
    tell(progress, "head_seen", stage=1, round=4, members=2)
    tell(progress, "majority_missing", stage=1, round=4, alive=1, members=2)
    assert lines_of(progress)[1] == ["1", "4", "2", "1", "of", "2", "members", "alive"]
    tell(progress, "regrouped", stage=1, term=2, round=4, members=1)
    assert told(progress) == [
        "coordinator is in the run 'big': a model in 2 stages, 9 rounds",
        "stage 1 begins with 2 members",
        "round 4 of stage 1 committed by 2 members",
        "stage 1 has lost its majority at round 4: 1 of 2 members alive",
        "stage 1 is regrouped and continues from round 4 with 1 member (term 2)",
    ]
    assert lines_of(progress)[1] == ["1", "4", "1", "training"]


def test_a_lost_stage_is_named_with_its_last_members() -> None:
    progress = coordinator_view(2)
    tell(progress, "member_joined", peer="12D3KooWverylong", name="ann")
    tell(progress, "members_away", stage=0, round=4, members=["12D3KooWverylong", "12D3KooWunknown99"])
    tell(progress, "stage_set_back", stage=0, round=4, goes_on_at=6)
    tell(progress, "prefix_full", stage=0, round=6, prefix="203.0.113.0/24", waiting=2, most=8)
    assert told(progress)[1:] == [
        "no live peer can continue stage 0 from round 4: start one of ann, nknown99 again",
        "stage 0 continues at round 6 like the others, with the weights it had at round 4",
        "2 peers of the address prefix 203.0.113.0/24 must wait: a group has 8 members of one prefix at most;"
        " for more machines of one network, create the run with a higher [run] members_per_prefix",
    ]


@pytest.mark.parametrize("stages", [1, 2])
def test_the_run_is_complete_with_its_last_stage(stages: int) -> None:
    progress = coordinator_view(stages)
    for stage in range(stages):
        assert not progress.complete and "go on training" in _farewell(progress, HOME)
        tell(progress, "run_completed", round=9, **({"stage": stage} if stages > 1 else {}))
    assert progress.complete and _farewell(progress, HOME) == "The run is complete. It is kept in coordinator."
    assert told(progress)[1:] == ["the run is complete at round 9"]
    tell(progress, "members_away", round=9, members=[], **({"stage": 0} if stages > 1 else {}))
    assert "for late joiners, start one of its members again" in told(progress)[-1]
    assert lines_of(progress)[0][-1] == "complete"


def test_a_whole_model_is_one_group_without_stages() -> None:
    progress = coordinator_view(1)
    tell(progress, "regrouped", term=1, round=0, members=3)
    tell(progress, "majority_missing", round=2, alive=1, members=3)
    assert "stage" not in shown(progress) and "1 of 3 members alive" in shown(progress)
    assert told(progress)[1:] == [
        "the run begins with 3 members",
        "the run has lost its majority at round 2: 1 of 3 members alive",
    ]


def test_the_coordinator_has_no_line_beside_peers() -> None:
    progress = Progress("a quickstart", stages=2)
    progress.row("peer-1")
    tell(progress, "run_entered", name="big", role="coordinator", rounds=9, stages=2)
    progress.apply("peer-1", "round_committed", 1.0, committed(0, 1))
    tell(progress, "head_seen", stage=0, round=1, members=2)
    assert "coordinator" not in shown(progress) and len(told(progress)) == 1
