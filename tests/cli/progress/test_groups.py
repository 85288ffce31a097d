"""The coordinator's terminal: one group, or one a stage of a pipeline."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli.commands.coordinate import _farewell
from cli.progress.progress import Progress
from tests.cli.views.test_pipeline_views import committed, shown, told

HOME = "coordinator"


def coordinator_view(stages: int) -> Progress:
    progress = Progress("coordinator", homes={HOME: Path("/a/home")})
    tell(progress, "run_entered", name="big", role="coordinator", rounds=9, stages=stages, tokenizer="bytes")
    return progress


def tell(progress: Progress, event: str, **fields: Any) -> None:
    progress.apply(HOME, event, 1.0, fields)


def lines_of(progress: Progress) -> list[list[str]]:
    """The words of each line of the table."""
    return [line.split() for line in shown(progress).splitlines() if line.split()[:1] and line.split()[0].isdigit()]


@pytest.mark.parametrize(
    ("name", "words"), [("bytes", "text as bytes"), ("ab" * 32, "text by tokenizer.json abababab")]
)
def test_the_run_says_how_it_reads_text(name: str, words: str) -> None:
    progress, said = Progress("p"), list[str]()
    progress.say = said.append
    tell(progress, "run_entered", name="big", role="auto", rounds=9, stages=1, tokenizer=name)
    assert len(said) == 1 and words in said[0]


def test_each_stage_has_a_line_and_is_named_in_notes() -> None:
    progress = coordinator_view(2)
    assert lines_of(progress) == [
        ["0", "0", "0", "waiting", "for", "peers"],
        ["1", "0", "0", "waiting", "for", "peers"],
    ]
    tell(progress, "regrouped", stage=1, term=1, round=0, members=2)
    tell(progress, "head_seen", stage=1, round=4, members=2)
    tell(progress, "quorum_lost", stage=1, round=4, reason="too few members answer", away=["12D3KooWunknown99"])
    assert lines_of(progress)[1] == ["1", "4", "2", "cannot", "go", "on"]
    tell(progress, "regrouped", stage=1, term=2, round=4, members=1)
    assert told(progress) == [
        "coordinator is in the run 'big': a model in 2 stages, 9 rounds, text as bytes",
        "stage 1 begins with 2 members",
        "round 4 of stage 1 committed by 2 members",
        "stage 1 cannot go on from round 4 (too few members answer): start nknown99 again, or continue without"
        " them with `peer regroup --home /a/home`",
        "stage 1 is regrouped and continues from round 4 with 1 member (term 2)",
    ]
    assert lines_of(progress)[1] == ["1", "4", "1", "training"]


@pytest.mark.parametrize("first", [0, 3])
def test_a_restarted_coordinator_does_not_time_the_rounds_that_it_catches_up_with(first: int) -> None:
    view = coordinator_view(1)
    for number, at in ((first, 100.0), (first + 1, 100.5)):
        view.apply(HOME, "head_seen", at, {"round": number, "members": 3})
    assert view.pace.round_s == (0.5 if first == 0 else None)
    for number, at in ((first + 2, 140.0), (first + 3, 180.0)):
        view.apply(HOME, "head_seen", at, {"round": number, "members": 3})
    assert view.pace.round_s == (39.5 if first == 0 else 40.0)


def test_a_lost_stage_is_named_with_its_last_members() -> None:
    progress = coordinator_view(2)
    tell(progress, "member_joined", peer="12D3KooWverylong", name="ann")
    away = ["12D3KooWverylong", "12D3KooWunknown99"]
    tell(progress, "quorum_lost", stage=0, round=4, reason="too few members answer", away=away)
    tell(progress, "stage_set_back", stage=0, round=4, goes_on_at=6)
    tell(progress, "prefix_full", stage=0, round=6, prefix="203.0.113.0/24", waiting=2, most=8)
    assert told(progress)[1:] == [
        "stage 0 cannot go on from round 4 (too few members answer): start ann, nknown99 again, or continue without"
        " them with `peer regroup --home /a/home`",
        "stage 0 continues at round 6 like the others, with the weights it had at round 4",
        "2 peers of the address prefix 203.0.113.0/24 must wait: a group has 8 members of one prefix at most;"
        " for more machines of one network, create the run with a higher [run] members_per_prefix",
    ]


def test_a_full_roster_is_told_once_and_again_when_more_are_left_out() -> None:
    progress = coordinator_view(1)
    tell(progress, "member_joined", peer="12D3KooWverylong", name="ann")
    for number, peers in ((4, ["12D3KooWverylong"]), (5, ["12D3KooWunknown99"]), (6, ["12D3KooWverylong"] * 2)):
        tell(progress, "roster_full", round=number, members=3, bytes=786000, left_out=len(peers), peers=peers)
    told_of = "all take turns, and what is not merged is kept for the next update; create the next run with a lower"
    assert told(progress)[1:] == [
        f"round 4 of the run has room for 3 updates (786.0 kB), not for 1 more (ann): {told_of} [run] max_peers or more"
        " [pipeline] stages",
        f"round 6 of the run has room for 3 updates (786.0 kB), not for 2 more (ann, ann): {told_of} [run] max_peers or"
        " more [pipeline] stages",
    ]


def test_a_peer_is_told_that_the_group_has_no_place() -> None:
    progress = coordinator_view(1)
    tell(progress, "group_full", round=4, most=64)
    assert told(progress)[1:] == [
        "coordinator waits for a place: the run has 64 peers, as many as its [run] max_peers allows; it is taken in"
        " once one of these has left"
    ]


def test_the_operator_is_told_who_holds_half_of_the_votes() -> None:
    progress = coordinator_view(1)
    tell(progress, "votes_in_one_hand", round=4, votes=3, members=5, invite="ab12cd34ef", prefix="")
    tell(progress, "votes_in_one_hand", round=4, votes=4, members=5, invite="", prefix="203.0.113.0/24")
    remedy = (
        ": if these are one person's, that person decides what this run's history is; where you post an invite"
        ' publicly, create the run with [run] coordinator = "required"'
    )
    assert told(progress)[1:] == [
        f"3 of 5 members came by the invite ab12cd34{remedy}",
        f"4 of 5 members are at the address prefix 203.0.113.0/24{remedy}",
    ]


def test_the_operator_is_told_of_a_second_process_with_the_key() -> None:
    progress = coordinator_view(1)
    tell(progress, "second_process", ip="203.0.113.4")
    tell(progress, "second_process", ip="")
    near, relayed = told(progress)[1:]
    assert near.startswith("another process was started at 203.0.113.4 with this coordinator's key, and has stopped")
    assert relayed.startswith("another process was started with this coordinator's key")


def test_the_operator_is_told_whose_disk_takes_nothing() -> None:
    progress = coordinator_view(1)
    tell(
        progress,
        "member_unsaved",
        peer="12D3KooWx",
        name="ann",
        reason="cannot write its disk: No space left on device",
    )
    assert told(progress)[-1].startswith(
        "ann cannot write its disk: No space left on device: it takes part in no round"
    )


def test_the_operator_is_told_whom_a_withdrawn_invite_keeps() -> None:
    progress = coordinator_view(1)
    tell(progress, "invite_withdrawn", kept=["ann 1a2b3c", "b\x1b[2Jb 4d5e6f"], dropped=1)
    tell(progress, "invite_withdrawn", kept=[f"p {n}" for n in range(40)], dropped=7)
    one, many = told(progress)[1:]
    assert one.startswith("the invite printed before is withdrawn: it keeps ann 1a2b3c, b") and "\x1b" not in one
    assert one.endswith("and 1 key that came by it is out")
    assert many.endswith("p 31 and 8 more, and 7 keys that came by it are out")


@pytest.mark.parametrize("stages", [1, 2])
def test_the_run_is_complete_with_its_last_stage(stages: int) -> None:
    progress = coordinator_view(stages)
    for stage in range(stages):
        assert not progress.complete and "The run is kept in coordinator." in _farewell(progress, Path(HOME))
        tell(progress, "run_completed", round=9, **({"stage": stage} if stages > 1 else {}))
    export = "`peer export --home /a/home --out DIR`"
    ends = f"The run is complete. It is kept in /a/home; {export} writes the model."
    assert progress.complete and _farewell(progress, Path("/a/home")) == ends
    assert told(progress)[1:] == ["complete: round 9 of 9"]
    assert "complete" in shown(progress).split("complete: round")[0]


def test_members_that_are_left_go_on() -> None:
    progress = coordinator_view(1)
    assert "go on training" not in _farewell(progress, Path(HOME)), "there is none"
    tell(progress, "regrouped", term=1, round=0, members=3)
    assert "its members keep training, or wait where they need its vote" in _farewell(progress, Path(HOME))


@pytest.mark.parametrize("stages", [1, 2])
def test_many_peers_in_one_view_are_complete_once(stages: int) -> None:
    """The quickstart's view follows all of its peers."""
    progress = Progress("quickstart", keeps_all=True, stages=stages)
    for peer in ("a", "b", "c"):
        for stage in range(stages):
            progress.apply(peer, "run_completed", 1.0, {"round": 9, **({"stage": stage} if stages > 1 else {})})
            assert bool(progress.notes) is (peer != "a" or stage == stages - 1)
    assert told(progress) == ["complete: round 9 of 9"]


def test_a_whole_model_is_one_group_without_stages() -> None:
    progress = coordinator_view(1)
    tell(progress, "regrouped", term=1, round=0, members=3)
    tell(progress, "quorum_lost", round=2, reason="too few voters answer", away=[])
    tell(progress, "quorum_lost", round=2, reason="too few voters answer", away=["a", "b"], alone=True)
    assert "no member answers, so check this machine's own connection first" in told(progress)[-1]
    assert "stage" not in shown(progress)
    tell(progress, "coordinator_restored")
    assert told(progress)[1:3] == [
        "the run begins with 3 members",
        "the run cannot go on from round 2 (too few voters answer): start its members again, or continue without them"
        " with `peer regroup --home /a/home`",
    ]
    assert "it does nothing before `peer regroup --home /a/home`" in told(progress)[4]


def test_the_coordinator_has_no_line_beside_peers() -> None:
    progress = Progress("a quickstart", stages=2)
    progress.peer("peer-1")
    tell(progress, "run_entered", name="big", role="coordinator", rounds=9, stages=2)
    progress.apply("peer-1", "round_committed", 1.0, committed(0, 1))
    tell(progress, "head_seen", stage=0, round=1, members=2)
    assert "coordinator" not in shown(progress) and len(told(progress)) == 1


def test_peers_beyond_those_that_the_first_round_needs_are_counted_alone() -> None:
    progress = Progress("p")
    tell(progress, "run_entered", name="big", role="full", rounds=9, stages=1, tokenizer="bytes", min_peers=2)
    for name in ("ann", "ben", "cyd"):
        tell(progress, "member_joined", peer=f"12D3KooW{name}", name=name, role="full")
    assert told(progress)[1:] == ["ann is here: 1 of 2 peers", "ben is here: 2 of 2 peers", "cyd is here: 3 peers"]


def test_a_relay_that_has_no_place_is_noted_once_until_it_has_one() -> None:
    progress, relay = Progress("p"), f"/ip4/203.0.113.7/tcp/4001/p2p/{'1' * 52}"
    for event in ("relay_failed", "relay_failed", "relay_reserved", "relay_reserved", "relay_failed"):
        tell(progress, event, relay=relay, reason="nothing listens there")
    tell(progress, "port_not_mapped", port=31337, reason="no router here opens ports by UPnP")
    tell(progress, "port_mapped", port=31337, address="/ip4/203.0.113.9/tcp/31337")
    no_place = "coordinator has no place at the relay /ip4/203.0.113.7/tcp/4001: nothing listens there"
    assert told(progress) == [
        no_place,
        "coordinator can be reached through the relay /ip4/203.0.113.7/tcp/4001",
        no_place,
        "coordinator: no router here opens ports by UPnP",
        "coordinator: the router forwards /ip4/203.0.113.9/tcp/31337 to this machine",
    ]
