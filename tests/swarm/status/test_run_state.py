"""The state and the verdict of a training run, from fixtures."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from optim.config import GossipConfig
from swarm.membership.completion import COMPLETE
from swarm.membership.member_record import MemberRecord
from swarm.protocol.head import Learner, Member
from swarm.run.manifest import Manifest
from swarm.status.head_chain import HeadChain
from swarm.status.state import MonitorState
from tests.swarm.status.scenes import NOW, chain_of, finite, heads_of, next_head, peer, shown, told

COORDINATOR: Any = {"name": "coordinator", "role": "coordinator"}


def three(**rules: Any) -> tuple[Manifest, dict[str, MemberRecord], HeadChain]:
    """Members a, b and c at round 4, and the coordinator."""
    manifest = finite(**rules)
    records = {name: peer(name=f"{name}nn", speed=2.0, round=4) for name in "abc"}
    records[manifest.authority] = peer(**COORDINATOR, round=4)
    return manifest, records, chain_of(heads_of(manifest, "abc", 4))


def said(state: MonitorState) -> str:
    return f"{state.verdict.word}: {state.verdict.reason}"


def test_a_healthy_run() -> None:
    manifest, records, chain = three()
    state = shown(manifest, records, [chain], "abc")
    assert (state.verdict.level, state.verdict.word, state.verdict.remedy) == ("good", "healthy", "")
    assert "3 of 3 members answer and 2 are needed; round 4 came 10 s ago, a round takes 10 s" in said(state)
    [stage] = state.stages
    assert stage.facts is not None and (stage.facts.round, stage.facts.tokens, stage.facts.quorum) == (4, 4000, 2)
    assert (stage.seen.answering, stage.seen.margin, stage.claims.replicas) == (3, 1, 3)


def test_one_more_death_stops_it() -> None:
    manifest, records, chain = three()
    state = shown(manifest, records, [chain], "ab")
    assert state.verdict.level == "edge" and "one more that falls silent stops it" in said(state)
    assert "peer join" in state.verdict.remedy


def test_without_a_majority_it_stands_still_and_says_how_many_are_missing() -> None:
    manifest, records, chain = three()
    state = shown(manifest, records, [chain], "a")
    assert said(state) == "stopped: 1 of the 3 members of round 4 answer, and 2 are needed"
    assert "start 1 of the missing again" in state.verdict.remedy and "peer regroup" in state.verdict.remedy


def test_all_members_are_away_while_the_coordinator_is_here() -> None:
    manifest, records, chain = three()
    only = {manifest.authority: records[manifest.authority]}
    state = shown(manifest, only, [chain], [manifest.authority])
    assert said(state) == "everybody away: none of the 3 members of round 4 answers"
    assert [(m.peer, m.claims, m.seen.answers) for m in state.members[:3]] == [(name, None, False) for name in "abc"]


def test_everybody_is_away() -> None:
    manifest, _, chain = three()
    state = shown(manifest, {}, [chain], [])
    assert said(state).startswith("everybody away: no peer of this run answers, nor does the coordinator")
    assert "the last commit that was seen is of round 4" in said(state)
    state = shown(manifest, {}, [chain_of([manifest.first_head(0)])], [])
    assert said(state).startswith("everybody away") and "no round is committed yet" in said(state)


def test_a_run_that_has_not_begun() -> None:
    manifest = finite(min_peers=3)
    chain = chain_of([manifest.first_head()])
    coordinator = {manifest.authority: peer(**COORDINATOR, round=0)}
    state = shown(manifest, coordinator | {"a": peer(name="ann", round=0)}, [chain], [manifest.authority])
    assert said(state) == "not begun: 1 of the 3 peers that the run begins with are here"
    assert state.verdict.level == "waiting" and "start 2 more" in state.verdict.remedy
    state = shown(manifest, {"a": peer(name="ann", round=0)}, [chain], "a")
    assert "the coordinator, which begins the run, publishes no record" in said(state)
    assert "peer coordinate" in state.verdict.remedy


@pytest.mark.parametrize("kept", [True, False])
def test_a_run_that_is_over(kept: bool) -> None:
    manifest = finite()
    chain = chain_of(heads_of(manifest, "abc", 9))
    phase = COMPLETE if kept else "waiting for the last state"
    state = shown(
        manifest, {manifest.authority: peer(**COORDINATOR, round=9, phase=phase)}, [chain], [manifest.authority]
    )
    assert state.verdict.word == ("complete" if kept else "complete, not kept")
    assert "round 9 of 9 is committed" in state.verdict.reason
    assert ("peer export" if kept else "a member that took part to the end") in state.verdict.remedy


def test_a_run_whose_peers_have_all_left_with_its_last_round_is_over() -> None:
    manifest = finite()
    state = shown(manifest, {}, [chain_of(heads_of(manifest, "abc", 9))], [])
    assert said(state) == "complete: round 9 of 9 is committed, and all peers have left"


def test_a_run_that_needs_its_coordinator() -> None:
    manifest, records, chain = three(coordinator="required")
    del records[manifest.authority]
    state = shown(manifest, records, [chain], "abc")
    assert said(state) == "stopped: the coordinator is away, and in this run each commit needs its vote"


def test_no_commit_for_long_says_why_the_last_attempt_failed() -> None:
    manifest, records, _ = three()
    chain = chain_of(heads_of(manifest, "abc", 4), seen_s=200)
    events = {"a": [told("attempt_failed", round=5, attempt=2, reason="too few contributions \x1b[31m")]}
    state = shown(manifest, records, [chain], "abc", told=events)
    assert state.verdict.level == "bad" and "no commit for 3 min though enough members answer" in said(state)
    assert "as its leader says: too few contributions ?[31m" in said(state) and "claims" in state.verdict.basis
    assert shown(manifest, records, [chain_of(heads_of(manifest, "abc", 4), seen_s=100)], "abc").verdict.level == "good"


def test_a_stage_without_replicas_is_named() -> None:
    manifest = finite(2, coordinator="required")
    records = {"a": peer(name="ann", role="stage", stage=0), manifest.authority: peer(**COORDINATOR)}
    chains = [chain_of(heads_of(manifest, names, 2, stage)) for stage, names in enumerate("ab")]
    state = shown(manifest, records, chains, "ab")
    assert said(state) == "stopped: stage 1 (blocks 3 to 5) has no replica"
    assert state.verdict.remedy == "start a peer with `peer join INVITE --stage 1`"
    records["b"] = peer(name="bob", role="stage", stage=1, ready_at=NOW + 9)
    assert shown(manifest, records, chains, "ab").verdict.level == "waiting"
    assert {line.stage for line in state.rounds} == {0, 1}


def test_a_gossip_run_has_no_heads() -> None:
    manifest = msgspec.structs.replace(finite(), outer=GossipConfig(steps=4))
    state = shown(manifest, {"a": peer(name="ann", round=3), "b": peer(name="bob", round=5)}, [HeadChain()], [])
    assert said(state) == "going on: 2 peers train by gossip, at rounds 3 to 5, as they say"
    assert state.verdict.basis == ("claims",) and state.rounds == ()


def test_rounds_say_who_took_part_from_heads_alone() -> None:
    manifest, records, _ = three()
    heads = heads_of(manifest, "abc", 2)
    heads.append(next_head(heads[-1], absent=["b"], learners=[Learner(Member("d", "s"), 1)], attempt=2))
    heads.append(msgspec.structs.replace(next_head(heads[-1]), members=heads[-1].members[::2]))
    events = {
        "a": [
            told("round_trained", NOW - 30, round=3, loss=2.0),
            told("attempt_failed", round=3, reason="b is silent"),
        ],
        "c": [told("round_trained", NOW - 24, round=3, loss=4.0)],
        "x": [told("round_trained", NOW, round=3, loss=float("nan")), told("round_trained", round=1 << 40, loss=0.0)],
    }
    state = shown(manifest, records, [chain_of(heads)], "ac", told=events)
    fourth, third, *_, start = state.rounds
    assert (third.facts.took_part, third.facts.absent, third.facts.joined) == (("a", "c", "d"), ("b",), ("d",))
    assert (third.facts.discarded, third.claims.failures) == (2, ("b is silent",))
    assert (third.claims.last, third.claims.behind_s) == ("c", 6.0), "x took no part"
    assert (fourth.facts.left, fourth.facts.absent) == (("b", "d"), ("b", "d"))
    assert start.starts_term and start.facts.took_part == ()
    assert [(point.round, point.train, point.peers) for point in state.loss] == [(3, 3.0, 2)], "no head is at 1 << 40"
    merged = {member.peer: (member.facts.merged, member.facts.missed) for member in state.members}
    assert merged["a"] == (4, 0) and merged["b"] == (2, 2)


def test_facts_and_claims_are_never_mixed() -> None:
    """Whatever records say, the facts stay those of the heads."""
    manifest, records, chain = three()
    honest = shown(manifest, records, [chain], "abc")
    lies = {
        name: msgspec.structs.replace(one, round=99, tokens=1 << 60, members=7, state_hash=b"x" * 32, term=9)
        for name, one in records.items()
    }
    lying = shown(manifest, lies, [chain], "abc")
    assert [stage.facts for stage in lying.stages] == [stage.facts for stage in honest.stages]
    assert [(m.peer, m.facts) for m in lying.members] == [(m.peer, m.facts) for m in honest.members]
    assert lying.rounds == honest.rounds


def test_what_strangers_write_is_made_plain_and_no_address_is_told() -> None:
    manifest, records, chain = three()
    name = "<script>alert(1)</script>"
    records["b"] = records["c"] = peer(name="bob", addresses=["/ip4/9.9.9.8/tcp/4001"])
    records["a"] = peer(name=name, addresses=["/ip4/9.9.9.9/tcp/4001"])
    events = {
        "a": [told("peer_penalized", peer="b", reason="\x1b]0;x\x07 <b>bold</b>"), told("member_left", peer="q" * 128)]
    }
    state = shown(manifest, records, [chain], "abc", told=events)
    text = msgspec.json.encode(state).decode()
    assert name in text, "the page shows it as text"
    assert "are at one address prefix" in state.cautions[0]
    assert "9.9.9" not in text and "\\u001b" not in text and "\\u0007" not in text
    assert next(member for member in state.members if member.peer == "a").seen.link == "direct"


def test_ten_thousand_strangers() -> None:
    manifest, records, chain = three()
    strangers = {f"stranger {n:05}": peer(name="x" * 64, round=n % 9) for n in range(10_000)}
    state = shown(manifest, strangers | records, [chain], "abc")
    assert [member.peer for member in state.members[:3]] == ["a", "b", "c"], "members of the head come first"
    assert state.monitor.members_left_out == 10_004 - len(state.members) > 9000
    assert len(msgspec.json.encode(msgspec.structs.replace(state, names={}))) < 300_000
