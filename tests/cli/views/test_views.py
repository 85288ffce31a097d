"""The live table, the report and the loss curve, from the event stream."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from cli.demo.report import broken_in_whole, broken_invariants, ddp_bytes
from cli.progress.event_tail import EventTail
from cli.progress.progress import Progress
from cli.views.table import live_view
from optim.config import GossipConfig
from peer.catalogue.rounds import RoundCommitted
from peer.corpus_facts import CorpusFacts
from peer.events import EventLog
from peer.figures import size_text
from tests.swarm.membership.test_bans import record
from tests.swarm.placement.test_stages import manifest_of
from tests.swarm.status.test_reading import shown as shown_status
from tests.swarm.status.test_reading import state_of


def shown(progress: Progress) -> str:
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        console.print(live_view(progress, 120))
    return console.export_text()


def test_the_table_follows_the_events() -> None:
    progress = Progress("a run")
    progress.apply("a", "val_evaluated", 1.5, {"round": 0, "loss": 5.5})
    fields = {"round": 1, "state_hash": "abcdef0123", "members": 3, "loss": 2.5, "bytes_up": 1500, "bytes_down": 10}
    for name in ("a", "b"):
        progress.apply(name, "round_committed", 2.0, fields)
    progress.apply("a", "phase_entered", 2.0, {"round": 2, "phase": "exchange"})
    progress.apply("b", "no_such_event", 3.0, {"whatever": 1})
    text = shown(progress)
    for word in ("a run", "exchanging", "2.500", "5.500", "1.5 kB", "abcdef01"):
        assert word in text
    assert text.count("round 1 committed by 3 members") == 1  # noted once, though two peers report it
    assert progress.round == 1 and progress.val_losses == {0: 5.5}


def test_a_paused_peer_is_shown_as_such_whatever_its_group_does() -> None:
    progress = Progress("a run")
    progress.apply("a", "round_committed", 1.0, {"round": 1, "state_hash": "abcdef0123", "members": 3})
    progress.apply("a", "peer_paused", 2.0, {"reason": "steam runs"})
    progress.apply("a", "round_committed", 3.0, {"round": 2, "state_hash": "abcdef0124", "members": 3})
    assert shown(progress).count("paused by its owner") == 2, "in the row and in the note"
    assert any(note.endswith("a is paused by its owner: steam runs") for note in progress.notes)
    progress.apply("a", "peer_resumed", 4.0, {})
    assert shown(progress).count("paused by its owner") == 1


def test_a_lost_peer_is_noted_once_by_name() -> None:
    progress = Progress("a run")
    progress.apply("a", "member_joined", 1.0, {"peer": "12D3KooWverylong", "name": "b"})
    for name in ("a", "c"):
        progress.apply(name, "peer_suspect", 2.0, {"peer": "12D3KooWverylong"})
    progress.apply("c", "peer_recovered", 3.0, {"peer": "12D3KooWverylong"})
    assert [note.split("  ", 1)[1] for note in progress.notes] == [
        "b is not heard",
        "b is heard again",
    ]


def test_long_work_shows_its_progress() -> None:
    progress = Progress("a run")
    progress.apply("a", "state_progress", 1.0, {"done_bytes": 50, "size_bytes": 200})
    assert "fetching state, 25%" in shown(progress)
    progress.apply("a", "phase_entered", 1.0, {"round": 2, "phase": "compute", "step": 100, "steps": 50})
    progress.apply("a", "inner_step", 11.0, {"step": 109, "loss": 3.25, "tokens_per_s": 5000.4})
    progress.now = lambda: 21.0
    for words in ("step 10 of 50", "30 s left", "3.250", "5,000 tokens/s"):
        assert words in shown(progress)
    progress.peer("b")
    assert "step 10/50" in shown(progress)


def test_notes_are_lines_where_there_is_no_terminal() -> None:
    lines: list[str] = []
    progress = Progress("a run", say=lines.append)
    progress.apply("a", "round_discarded", 1.0, {"round": 4, "reason": "no quorum"})
    progress.apply("a", "checkpoint_failed", 1.0, {"round": 4, "reason": "disk full"})
    assert [line.split("  ", 1)[1] for line in lines] == ["a discards round 4: no quorum", "a: disk full"]


def test_a_full_disk_is_noted_once_until_a_round_is_saved() -> None:
    lines: list[str] = []
    progress = Progress("a run", say=lines.append)
    for at in range(3):
        progress.apply("a", "records_unsaved", at, {"reason": "cannot write x: free some space"})
    progress.apply("a", "state_at_risk", 4.0, {"round": 2, "reason": "no other peer keeps the state of round 2"})
    assert [line.split("  ", 1)[1] for line in lines] == [
        "a: cannot write x: free some space",
        "a: no other peer keeps the state of round 2",
    ]
    progress.apply("a", "round_committed", 5.0, {"round": 3, "members": 1})
    progress.apply("a", "records_unsaved", 6.0, {"reason": "cannot write y"})
    assert lines[-1].endswith("a: cannot write y")


def test_missing_text_and_lost_contact_are_noted() -> None:
    progress = Progress("a run")
    progress.apply("a", "text_missing", 1.0, {"reason": "no text (--data names a folder)"})
    for name in ("a", "a", "b"):
        progress.apply(name, "membership_stale", 2.0, {"reason": "no peer answers"})
    assert [note.split("  ", 1)[1] for note in progress.notes] == [
        "a: no text (--data names a folder)",
        "a: no peer answers",
        "b: no peer answers",
    ]


def test_the_first_commit_that_is_served_is_noted_and_each_that_is_not() -> None:
    progress = Progress("a run")
    for number in (3, 4):
        progress.apply("a", "commit_served", 1.0, {"round": number, "commit": "ab"})
    progress.apply("a", "commit_unserved", 2.0, {"round": 5, "reason": "its peers have gone on"})
    assert [note.split("  ", 1)[1] for note in progress.notes] == [
        'a serves round 3, and later ones: `peer generate INVITE "..."` asks it',
        "a cannot serve round 5 (its peers have gone on): it waits for the next one",
    ]


def test_what_was_read_is_noted_once() -> None:
    progress = Progress("a run")
    for account in ("1 file read", "1 file read", "2 files read"):
        progress.apply("a", "corpus_read", 1.0, {"account": [account], "files": 1})
    assert [note.split("  ", 1)[1] for note in progress.notes] == ["a: 1 file read", "a: 2 files read"]


def test_a_long_account_of_what_was_read_is_noted_whole(tmp_path: Path) -> None:
    account = "; ".join(f"{n} .suffix{n}" for n in range(60))
    facts = CorpusFacts(
        files=1, train_bytes=1, held_out_bytes=1, train_tokens=1, held_out_tokens=1, truncated=False, account=account
    )
    log, progress = EventLog(tmp_path / "events.jsonl"), Progress("a run")
    log.emit(facts.event())
    log.close()
    (line,) = (tmp_path / "events.jsonl").read_text().splitlines()
    progress.apply("a", "corpus_read", 1.0, json.loads(line))
    assert len(facts.account) > 600 and progress.notes[-1].endswith(f"a: {facts.account}")


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e9, "2.5 GB"), (5.4e12, "5.4 TB")]
)
def test_sizes(size: float, text: str) -> None:
    assert size_text(size) == text


def test_a_tail_reads_across_rotation_and_torn_lines(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    tail = EventTail(path)
    assert list(tail.poll()) == []
    log = EventLog(path, rotate_bytes=200)
    seen = []
    for number in range(20):
        log.emit("tick", number=number)
        seen += [fields["number"] for _, _, fields in tail.poll()]
    log.close()
    with path.open("ab") as file:
        file.write(b'{"at": 1, "event": "torn')
    assert list(tail.poll()) == []
    with path.open("ab") as file:
        file.write(b'"}\nnot json\n{"at": 2, "event": "whole"}\n')
    assert [name for _, name, _ in tail.poll()] == ["torn", "whole"]
    tail.close()
    assert seen == list(range(20))


def test_a_tail_may_start_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_text(json.dumps({"at": 1, "event": "old"}) + "\n")
    tail = EventTail(path, last_bytes=0)
    with path.open("a") as file:
        file.write(json.dumps({"at": 2, "event": "new"}) + "\n")
    assert [name for _, name, _ in tail.poll()] == ["new"]
    tail.close()


def commits(term: int = 1, /, **by_name: dict[int, str]) -> dict[str, dict[int, RoundCommitted]]:
    return {
        name: {number: RoundCommitted(round=number, state_hash=state, term=term) for number, state in rounds.items()}
        for name, rounds in by_name.items()
    }


GOOD = commits(a={1: "x", 2: "y"}, b={1: "x", 2: "y"}, k={1: "x"}, n={2: "y"})
FAULTS = {"killed": ["k"], "added": ["n"]}
LOSSES = {0: 5.5, 2: 2.2}


def test_a_good_run_breaks_no_invariant() -> None:
    assert broken_invariants(GOOD, {"a": 2, "b": 2, "n": 2}, 2, FAULTS) == broken_in_whole(LOSSES, 2, 100.0) == []


def test_a_round_repeated_after_a_regroup_is_no_fork() -> None:
    """The killed peer reported a round that no other peer had; the authority regrouped the others without it."""
    again = commits(1, k={1: "z"}) | commits(2, a={1: "x", 2: "y"}, b={1: "x", 2: "y"}, n={2: "y"})
    assert broken_invariants(again, {"a": 2, "b": 2, "n": 2}, 2, FAULTS) == []


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"commits": commits(a={1: "x", 2: "y"}, b={1: "z", 2: "y"})}, "after round 1 peers held 2 different states"),
        ({"ended": {"a": 2, "b": 1}}, "b ended at round 1 instead of 2"),
        ({"faults": {**FAULTS, "added": ["m"]}}, "m never took part"),
        ({"faults": {**FAULTS, "added": []}}, "no peer was added"),
        ({"faults": {**FAULTS, "killed": []}}, "no peer was killed"),
        ({"val_losses": {0: 5.5}}, "not measured"),
        ({"val_losses": {0: 5.5, 2: 6.0}}, "did not fall"),
        ({"traffic_factor": 10.0}, "only 10 times"),
    ],
)
def test_each_broken_invariant_is_named(changes: dict[str, Any], words: str) -> None:
    arguments: dict[str, Any] = {
        "commits": GOOD, "ended": {"a": 2, "b": 2}, "faults": FAULTS, "val_losses": LOSSES, "traffic_factor": 100.0,
        **changes,
    }  # fmt: skip
    measured = [arguments.pop("val_losses"), 2, arguments.pop("traffic_factor")]
    broken = [*broken_invariants(rounds=2, **arguments), *broken_in_whole(*measured)]
    assert any(words in sentence for sentence in broken), broken


def test_ddp_equivalent_is_a_ring_of_fp32_gradients() -> None:
    assert ddp_bytes(parameters=1000, inner_steps=10, peers=4) == 10 * 2 * 3 * 4000 // 4


@pytest.mark.parametrize("keeps_all", [False, True])
def test_only_the_last_rounds_are_kept(keeps_all: bool) -> None:
    progress = Progress("a run", keeps_all)
    for number in range(3000):
        progress.apply("a", "round_committed", 1.0, {"round": number, "state_hash": "ab"})
        progress.apply("a", "val_evaluated", 1.0, {"round": number, "loss": 2.0})
        progress.apply("a", "round_discarded", 1.0, {"round": number, "reason": "why"})
        progress.apply("a", "member_joined", 1.0, {"peer": f"peer {number}", "name": "b"})
        progress.apply("a", "peer_suspect", 1.0, {"peer": f"peer {number}"})
    kept = len(progress.commits["a"]), len(progress.val_losses), len(progress.discarded)
    assert kept == ((3000, 3000, 3000) if keeps_all else (64, 64, 64))
    assert max(progress.commits["a"]) == 2999
    assert len(progress.names) <= 1024 and len(progress.missed) <= 1024


def test_gossip_rounds_are_noted_per_peer() -> None:
    progress = Progress("a run")
    progress.apply("a", "member_joined", 1.0, {"peer": "12D3KooWverylong", "name": "b"})
    fields = {"round": 7, "partner": "12D3KooWverylong", "distance": 0.0213, "members": 3, "loss": 2.5}
    progress.apply("a", "gossip_met", 2.0, {**fields, "state_hash": "abcdef0123"})
    progress.apply("c", "gossip_alone", 3.0, {"round": 5, "partner": "", "distance": None, "state_hash": "0123"})
    assert progress.round == 7
    text = shown(progress)
    for words in ("a met b for round 7, 2.1% apart, loss 2.500", "c had no partner for round 5", "abcdef01"):
        assert words in text


def test_starting_gossip_peers_have_not_begun(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = manifest_of(1, outer=GossipConfig(steps=10))
    starting = msgspec.structs.replace(record("s"), round=-1)
    text = shown_status(state_of(manifest, {"a": starting, "b": starting}, [None]), capsys)
    assert "2 peers are here, and none of them trains yet" in " ".join(text.split())
    assert "at rounds 0 to 0" in shown_status(state_of(manifest, {"a": starting, "b": record("s")}, [None]), capsys)
