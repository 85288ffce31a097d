"""The status of a run, with one stage and with several."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from cli.terminal.screen import screen
from cli.views.monitor_view import _stage_lines, monitor_view
from optim.config import GossipConfig
from swarm.membership.completion import COMPLETE, WANTING
from swarm.membership.member_record import MemberRecord
from swarm.membership.proven_heads import ProvenHead
from swarm.protocol.head import Head, Member, Sponsor, Sponsorship
from swarm.run.manifest import Manifest
from swarm.status.head_chain import HeadChain
from swarm.status.reading import RunReading
from swarm.status.run_state import run_state
from swarm.status.state import MonitorState
from tests.swarm.membership.test_bans import record
from tests.swarm.placement.test_stages import manifest_of
from tests.swarm.status.scenes import WATCH, chain_of, history_of
from tests.swarm.support.stage_commits import begun

NOW = 1_800_000_000.0


def peer(**changes: object) -> MemberRecord:
    return msgspec.structs.replace(record("s"), at=NOW - 1, **changes)


def finite(stages: int) -> Manifest:
    """A run of 9 rounds."""
    manifest = manifest_of(stages)
    return msgspec.structs.replace(manifest, run=msgspec.structs.replace(manifest.run, rounds=9))


def candidate(manifest: Manifest, stage: int, round: int, members: list[str], there: int | None = None) -> ProvenHead:
    head: Head = begun(manifest.first_head(stage), *(Member(name, "s") for name in members))
    head = msgspec.structs.replace(head, round=round, tokens=1000 * round, state_hash=bytes([round]) * 32)
    return ProvenHead(head, (), (), head.members[:there])


def three_stages() -> tuple[Manifest, dict[str, MemberRecord], list[ProvenHead | None]]:
    """Stage 0 has two replicas, stage 1 one and one on its way from stage 0, stage 2 none."""
    manifest = manifest_of(3)
    records = {
        "a": peer(name="ann", role="stage", stage=0, queue=3.0, service_s=0.2, rate=2.5, phase="training"),
        "b": peer(name="bob", role="stage", stage=0, queue=1.0, service_s=0.4, rate=3.0, phase="training"),
        "c": peer(name="cyd", role="stage", stage=1, queue=2.0, service_s=0.1, phase="training"),
        "d": peer(name="dan", role="stage", stage=1, source=0, since=NOW - 5, ready_at=NOW + 12, queue=9, service_s=9),
        "e": peer(name="eve", role="stage", stage=1, since=NOW - 5, ready_at=NOW + 30, round=-1, phase="starting"),
        "f": peer(name="fay", role="feeder", round=-1, phase="feeding"),
        "z": peer(name="coordinator", role="coordinator"),
    }
    return manifest, records, [candidate(manifest, 0, 7, ["a", "b", "d"], 2), candidate(manifest, 1, 6, ["c"]), None]


def test_each_stage_has_its_state() -> None:
    manifest, records, best = three_stages()
    seen = state_of(manifest, records, best)
    facts = [stage.facts for stage in seen.stages]
    assert [one and (one.round, one.members, one.state_hash) for one in facts] == [
        (7, 3, "07" * 32), (6, 1, "06" * 32), None
    ]  # fmt: skip
    claims = [stage.claims for stage in seen.stages]
    assert [(one.replicas, one.arriving, one.queue) for one in claims] == [(2, 0, 2.0), (1, 2, 2.0), (0, 0, None)], (
        "who is on its way has not measured this stage"
    )
    assert [stage.seen.margin for stage in seen.stages] == [0, 0, None]
    assert [(stage.first, stage.end) for stage in seen.stages] == list(manifest.cuts)
    assert (seen.round, seen.tokens) == (None, 0)
    membership = {m.claims.name: m.facts.membership for m in seen.members if m.claims and m.claims.role == "stage"}
    assert membership == {"ann": "member", "bob": "member", "cyd": "member", "dan": "member", "eve": "none"}


def test_who_did_not_answer_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    manifest, records, best = three_stages()
    text = shown(state_of(manifest, records, best, silent=("b", "gone")), capsys)
    assert "no answer from bob b, the coordinator gone" in " ".join(text.split())
    assert "no answer" not in shown(state_of(manifest, records, best), capsys)


def test_the_run_stands_at_its_last_stages_round() -> None:
    manifest, records, best = three_stages()
    seen = state_of(manifest, records, [*best[:2], candidate(manifest, 2, 8, ["g"])])
    assert (seen.round, seen.tokens, [stage.seen.margin for stage in seen.stages]) == (6, 6000, [0, 0, 0])


def test_a_whole_model_has_no_stages() -> None:
    manifest = manifest_of(1)
    best = candidate(manifest, 0, 4, ["a", "b"])
    records = {"a": peer(name="ann"), "b": peer(name="bob"), "c": peer(name="cyd")}
    seen = state_of(manifest, records, [best])
    [stage] = seen.stages
    assert stage.facts is not None and (seen.round, stage.facts.state_hash) == (4, "04" * 32)
    assert (stage.facts.members, stage.facts.quorum, stage.seen.answering, seen.tokens) == (2, 2, 2, 4000)
    assert [member.facts.membership for member in seen.members] == ["member", "member", "none"]
    nothing = state_of(manifest, {}, [None])
    assert (nothing.round, nothing.stages[0].facts, nothing.members) == (None, None, ())


def state_of(
    manifest: Manifest, records: dict[str, MemberRecord], best: Sequence[ProvenHead | None], **changes: Any
) -> MonitorState:
    """What a client shows of one reading, with `changes`."""
    reading = RunReading(manifest, NOW, records, tuple(best), **changes)
    chains = [chain_of([one.head]) if one else HeadChain() for one in best]
    return run_state(reading, chains, {}, {}, history_of(records), WATCH, names_invites=True)


def shown(state: MonitorState, capsys: pytest.CaptureFixture[str], guests: bool = False) -> str:
    console = screen(width=80)
    console.print(monitor_view(state, 80, guests=guests))
    return capsys.readouterr().out


def test_status_shows_stages_moves_and_feeders(capsys: pytest.CaptureFixture[str]) -> None:
    manifest, records, best = three_stages()
    text = shown(state_of(manifest, records, best), capsys)
    for words in (
        "dan is moving from stage 0 to stage 1, ready in about 12 s",
        "eve is joining stage 1, ready in about 30 s",
        "text is read by fay",
    ):
        assert words in text, text
    assert max(map(len, text.splitlines())) <= 80
    lines = [line.split() for line in text.splitlines()]
    assert "stage blocks round here/members quorum margin repl. batch/s queue phase" in text
    assert ["0", "0-1", "7", "2/3", "2", "0", "2", "5.5", "2.0", "training"] in lines
    assert ["1", "2-3", "6", "1/1", "1", "0", "1+2", "0.0", "2.0", "training"] in lines
    assert ["2", "4-5", "-", "-", "-", "-", "0", "0.0", "-", "not", "served"] in lines
    assert ["fay", "f", "-", "-", "-", "-", "-"] in [line[:7] for line in lines], "a feeder has neither stage nor round"
    best = [*best[:2], candidate(manifest, 2, 8, ["g"])]
    assert "round 6, 0.0 M tokens" in shown(state_of(manifest, records, best), capsys)


def test_a_stage_without_replicas_has_the_authoritys_round() -> None:
    """The authority's own head of the stage is only the one that began the term."""
    manifest, records, best = three_stages()
    told = peer(name="coordinator", role="coordinator", round=34, tokens=34_000)
    lost = candidate(manifest, 2, 0, ["h"], 0)
    records |= {manifest.authority: told}
    assert RunReading(manifest, NOW, records, (*best[:2], lost)).progress == (6, 6000)
    third = {manifest.authority: told}
    assert RunReading(manifest, NOW, third, (lost, lost, lost)).progress == (34, 34_000)


def test_status_tells_who_holds_half_of_the_votes_and_who_came_by_which_invite(
    capsys: pytest.CaptureFixture[str],
) -> None:
    manifest, sponsor = manifest_of(1), Sponsor("ab" * 16, 8)
    rules = msgspec.structs.replace(manifest.run, coordinator="witness")
    manifest = msgspec.structs.replace(manifest, run=rules)
    best = candidate(manifest, 0, 4, ["a", "b", "c"])
    came = tuple(Sponsorship(sponsor, name) for name in "ab")
    best = replace(best, head=msgspec.structs.replace(best.head, sponsored=came))
    there = {name: peer(name=f"{name}nn", addresses=["/ip4/9.9.9.9/tcp/1"]) for name in "abc"}
    state = state_of(manifest, there, [best])
    assert [(share.invite, share.prefix, share.votes) for share in state.shares] == [
        (sponsor.key, "", 2), ("", "9.9.9.0/24", 3)
    ]  # fmt: skip
    assert list(msgspec.to_builtins(state)["guests"]) == [
        {"invite": sponsor.key, "guests": 8, "peers": ("a", "b"), "members": 2}
    ]
    text = " ".join(shown(state, capsys).split())
    assert "2 of 3 members came by the invite abababab: if these are one person's" in text
    assert "3 of 3 members are at the address prefix 9.9.9.0/24: if these" in text
    text = " ".join(shown(state, capsys, guests=True).split())
    assert "invite abababab 2 of 8 guests, 2 members: ann a, bnn b" in text
    nobody = msgspec.structs.replace(state, guests=(), open=True)
    assert "No invite has brought in a peer: this run is open." in shown(nobody, capsys, guests=True)
    required = msgspec.structs.replace(manifest.run, coordinator="required")
    assert state_of(msgspec.structs.replace(manifest, run=required), there, [best]).shares == ()


def test_a_name_is_escaped_for_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    manifest, records, best = three_stages()
    for name in ("[/red]", "[link=x]y[/link]"):  # escapes are refused with the record
        records["d"] = msgspec.structs.replace(records["d"], name=name, phase=name)
        text = shown(state_of(manifest, records, best), capsys)
        assert f"{name} is moving from stage 0" in text


def test_the_held_out_loss_is_the_latest() -> None:
    manifest, records, best = three_stages()
    for name, number, loss in (("a", 7, 5.0), ("b", 7, 2.0), ("c", 6, 1.0)):
        records[name] = msgspec.structs.replace(records[name], round=number, val_loss=loss)
    seen = state_of(manifest, records, best)  # of peers of an earlier version, which tell no round
    assert (seen.val_loss, seen.val_round) == (2.0, None)
    records["a"] = msgspec.structs.replace(records["a"], val_round=6)
    records["c"] = msgspec.structs.replace(records["c"], val_round=5)
    seen = state_of(manifest, records, best)
    assert (seen.val_loss, seen.val_round) == (5.0, 6)
    assert {member.claims.val_round for member in seen.members if member.claims} >= {6, 5, None}


def test_status_names_the_round_of_the_held_out_loss(capsys: pytest.CaptureFixture[str]) -> None:
    manifest, one = manifest_of(1), peer(name="ann", round=4, val_loss=2.5, val_round=2)
    text = shown(state_of(manifest, {"a": one}, [candidate(manifest, 0, 4, ["a"])]), capsys)
    assert "held-out loss 2.500 (round 2)" in " ".join(text.split())


def test_status_of_a_whole_model_shows_no_stages(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = manifest_of(1)
    text = shown(state_of(manifest, {"a": peer(name="ann")}, [candidate(manifest, 0, 4, ["a"])]), capsys)
    assert "round 4, 0.0 M tokens, state 04040404" in text
    assert ["0", "0-5", "4", "1/1", "1", "0", "1"] in [line.split() for line in text.splitlines()], text


def test_a_run_that_has_not_begun_misses_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = manifest_of(1)
    coordinator = peer(name="coordinator", role="coordinator", round=0)
    first = ProvenHead(manifest.first_head(), ())
    text = shown(state_of(manifest, {manifest.authority: coordinator}, [first]), capsys)
    assert "NOT BEGUN" in text and "round 0, 0.0 M tokens" in text


def test_a_complete_run_misses_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    """All members have left, as they should."""
    manifest = finite(1)
    last = candidate(manifest, 0, 9, ["a", "b"], 0)
    coordinator = peer(name="coordinator", role="coordinator", round=9, phase=COMPLETE)
    seen = RunReading(manifest, NOW, {manifest.authority: coordinator}, (last,))
    assert (seen.complete, seen.kept, seen.progress) == (True, True, (9, 9000))
    text = shown(state_of(manifest, {manifest.authority: coordinator}, [last]), capsys)
    assert "COMPLETE  round 9 of 9 is committed; the coordinator keeps the last state" in text.replace("\n", " ")
    assert "round 9 of 9, 0.0 M tokens, state 09090909" in text and "STOPPED" not in text

    wanting = msgspec.structs.replace(coordinator, phase=WANTING)
    seen = RunReading(manifest, NOW, {manifest.authority: wanting}, (last,))
    assert (seen.complete, seen.kept) == (True, False)
    text = shown(state_of(manifest, {manifest.authority: wanting}, [last]), capsys)
    assert "COMPLETE, NOT KEPT" in text and "again a member that took part to the end" in text.replace("\n", " ")
    before = msgspec.structs.replace(coordinator, round=8, phase="coordinating")
    assert not RunReading(manifest, NOW, {manifest.authority: before}, (candidate(manifest, 0, 8, ["a"]),)).complete
    endless = RunReading(manifest_of(1), NOW, {manifest.authority: coordinator}, (last,))
    assert not endless.complete, "a run without an end"


def test_a_complete_pipeline_is_not_told_as_lost(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = finite(3)
    coordinator = peer(name="coordinator", role="coordinator", round=9, phase=COMPLETE)
    best: list[ProvenHead | None] = [candidate(manifest, stage, 9, ["a"], 0) for stage in range(3)]
    seen = RunReading(manifest, NOW, {manifest.authority: coordinator}, tuple(best))
    assert seen.complete and seen.kept and seen.progress[0] == 9
    state = state_of(manifest, {manifest.authority: coordinator}, best)
    assert state.verdict.level == "over" and "round 9 of 9 is committed" in shown(state, capsys)
    assert not any(line.style for line in _stage_lines(state, 80)[1:])
    best[1] = candidate(manifest, 1, 8, ["a"], 0)
    records = {manifest.authority: msgspec.structs.replace(coordinator, round=8), "a": peer(role="stage", stage=1)}
    assert not RunReading(manifest, NOW, records, tuple(best)).complete, "one stage has its last round to make"


def test_a_later_round_is_not_told_with_the_hash_of_an_earlier_state(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = finite(1)
    coordinator = peer(name="coordinator", role="coordinator", round=9)
    state = state_of(manifest, {manifest.authority: coordinator}, [ProvenHead(manifest.first_head(), ())])
    assert "round 9 of 9, 0.0 M tokens\n" in shown(state, capsys)


def test_a_gossip_run_is_complete_with_its_last_peer(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = msgspec.structs.replace(finite(1), outer=GossipConfig(steps=4))
    for rounds, complete in (((9, 8), False), ((9, 9), True)):
        records = {str(index): peer(name="a", round=number) for index, number in enumerate(rounds)}
        assert RunReading(manifest, NOW, records, (None,)).complete is complete
        text = " ".join(shown(state_of(manifest, records, [None]), capsys).split())
        assert ("round 9 of 9 is committed; each home has its own weights" in text) is complete
    assert not RunReading(manifest, NOW, {}, (None,)).complete
    left = {manifest.authority: peer(name="coordinator", role="coordinator", round=9, phase=COMPLETE)}
    assert "round 9 of 9 is committed" in shown(state_of(manifest, left, [None]), capsys)
