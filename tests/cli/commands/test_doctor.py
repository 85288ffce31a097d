"""`peer doctor`: each failed check has a remedy."""

from __future__ import annotations

import json
import re
import socket
import time
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from cli.checks.confinement import confinement_finding, confinement_findings, environment_finding
from cli.checks.machine import (
    Finding,
    disk_finding,
    disk_speed_finding,
    failure,
    home_finding,
    kernels_finding,
    local_findings,
    memory_finding,
    python_finding,
)
from cli.checks.network import (
    answers,
    clock_finding,
    judged,
    leader_findings,
    port_finding,
    reach_finding,
    size_findings,
    source_findings,
    swarm_findings,
)
from cli.checks.text import text_finding
from optim.config import CodecConfig, GossipConfig
from optim.kernels import codec_kernels
from peer.confinement.confine import NOT_HERE, Restriction
from peer.errors import ConfigError, NotAdmitted
from peer.figures import duration_text
from peer.footprint.layout import Compute
from peer.identity import Identity
from peer.ipc.corpus_messages import OwnText
from peer.net.reach import LOCAL, Reach
from swarm.membership.reachability import DialBackReply, Outcome
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.peer_context import JoinConfig
from swarm.training.join_checks import check_join
from tests.cli.support.typed import Peer
from tests.cli.test_pipeline_input import manifest_of
from tests.swarm.run.test_manifest import make_manifest

NOWHERE = Invite("a" * 32, Identity.generate().peer_id, ())


def joining(home: Path, invite: Invite = NOWHERE, **more: Any) -> JoinConfig:
    return JoinConfig(home, invite, **{"compute": Compute("cpu"), **more})


def test_this_machine_passes(tmp_path: Path) -> None:
    findings = list(local_findings(tmp_path / "home", ["cpu"]))
    assert all(finding.state == "ok" for finding in findings), findings
    assert {"python", "torch", "libp2p", "kernels", "device", "home"} <= {finding.check for finding in findings}
    assert not (tmp_path / "home").exists()  # looking leaves nothing behind


def is_failure(finding: Finding, code: int) -> bool:
    return finding.state == "failure" and bool(finding.detail and finding.remedy) and finding.exit_code == code


def test_old_python() -> None:
    assert is_failure(python_finding((3, 9, 18)), 2)


def test_full_disk_and_small_memory(tmp_path: Path) -> None:
    assert is_failure(disk_finding(tmp_path / "not" / "yet", [1 << 60]), 5)
    assert is_failure(memory_finding(1e9, [2e9]), 5)


def test_a_stage_that_fits_is_enough(tmp_path: Path) -> None:
    assert is_failure(disk_finding(tmp_path, [1 << 60, 1 << 61]), 5)
    found = disk_finding(tmp_path, [1, 1 << 60])
    assert found.state == "warning" and "for the largest stage" in found.detail and found.exit_code == 0
    assert disk_finding(tmp_path, [1, 2]).state == "ok"


def test_a_slow_disk_is_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = disk_speed_finding(tmp_path / "not" / "yet", 1e6)
    assert found.state == "ok" and "a round writes 0.001 GB" in found.detail
    assert is_failure(disk_speed_finding(Path("/proc"), 1e9), 5)
    clock = iter([0.0, 128.0])
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    found = disk_speed_finding(tmp_path, 1e9)
    assert found.state == "warning" and "1 MB/s; a round writes 1 GB in 9.5e+02 s" in found.detail
    assert not list(tmp_path.iterdir())


def test_memory_that_is_short_is_told_of() -> None:
    assert is_failure(memory_finding(1e9, [3e9, 2e9]), 2) and "feeder" in memory_finding(1e9, [3e9, 2e9]).remedy
    found = memory_finding(1e9, [3e9, 0.5e9])
    assert found.state == "warning" and "0.5 GB needed for the smallest stage and 3.0 GB" in found.detail
    assert memory_finding(1e9, [0.5e9, 0.6e9]).state == "ok"
    assert "in files of --home (--state disk), about 0.5 GB" in memory_finding(1e9, [0.5e9], in_files=True).detail


def test_each_stage_of_a_pipeline_is_measured(tmp_path: Path) -> None:
    manifest = manifest_of(Identity.generate(), 3)
    wide = msgspec.structs.replace(manifest.model, layers=4, vocab_size=1 << 24, hidden_size=4096, head_dim=16)
    four = msgspec.structs.replace(  # the second stage is small, and so is the third, whose backups it keeps
        manifest,
        model=wide,
        pipeline=msgspec.structs.replace(manifest.pipeline, stages=4),
        cuts=((0, 1), (1, 2), (2, 3), (3, 4)),
        genesis=(bytes(32),) * 4,
    )
    disk, _, memory = size_findings(four, joining(tmp_path))
    assert wide.vocab_size * wide.hidden_size > 1 << 35, "the first and the last stage fit nowhere"
    assert (disk.state, memory.state) == ("warning", "warning")


def test_it_tells_what_a_layout_gives(tmp_path: Path) -> None:
    whole, stages = (manifest_of(Identity.generate(), count) for count in (1, 3))
    two = joining(tmp_path, compute=Compute("cpu", ("cpu", "cpu"), "fsdp"))
    _, layout, memory = size_findings(whole, two)
    assert layout.detail.startswith("fsdp:2: each device holds 1/2 of the model, 0.0") and memory.state == "ok"
    _, layout, _ = size_findings(stages, two)
    assert layout.detail.startswith("fsdp:2: each device holds 1/2 of a stage, 0.0")
    across = list(size_findings(stages, joining(tmp_path, compute=Compute("cpu", ("cpu", "cpu"), "tp"))))[1]
    assert is_failure(across, 2) and "tp shares whole models only" in across.detail
    wrong = joining(tmp_path, compute=Compute("cpu", ("cpu", "cpu"), "tp:3"))
    assert "make the product" in list(size_findings(whole, wrong))[1].remedy


def test_a_home_that_is_in_use_or_cannot_be_written(tmp_path: Path) -> None:
    with Home(tmp_path).locked():
        assert is_failure(home_finding(tmp_path), 5)
    (tmp_path / "file").touch()
    assert is_failure(home_finding(tmp_path / "file" / "home"), 5)


def test_kernels_that_are_not_compiled_or_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_kernels, "KERNELS", {})
    missing = kernels_finding()
    assert missing.state == "warning" and "not compiled" in missing.detail and "compiler" in missing.remedy
    monkeypatch.setenv("BARNRAISE_KERNELS", "0")
    assert kernels_finding().remedy == "unset BARNRAISE_KERNELS"


def test_unknown_device(tmp_path: Path) -> None:
    finding = next(f for f in local_findings(tmp_path, ["abacus"]) if f.check == "device")
    assert is_failure(finding, 2)


def test_failed_checks_are_counted(peer: Peer, tmp_path: Path) -> None:
    options = ("--device", "abacus", "--listen", "/ip4/127.0.0.1/tcp/0")
    found = peer("doctor", "--home", tmp_path, *options)
    assert found.code == 2 and found.stdout.endswith("\nThis machine cannot take part: 1 check failed.\n")
    (tmp_path / "file").touch()
    found = peer("doctor", "--home", tmp_path / "file" / "home", *options)
    assert " checks failed." in found.stdout


async def test_port_in_use_and_port_free() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        finding = await port_finding(Reach((f"/ip4/127.0.0.1/tcp/{server.getsockname()[1]}",)))
        assert is_failure(finding, 5) and "--listen" in finding.remedy
    assert (await port_finding(LOCAL)).state == "ok"


@pytest.mark.parametrize(
    ("ahead_s", "state", "words"),
    [(0.3, "ok", "behind"), (-0.3, "ok", "ahead"), (60, "warning", "60.0 s behind"), (-60, "warning", "60.0 s ahead")],
)
def test_clock(ahead_s: float, state: str, words: str) -> None:
    finding = clock_finding(ahead_s)
    assert finding.state == state and words in finding.detail
    assert ("NTP" in finding.remedy) == (state == "warning")


@pytest.mark.parametrize(
    ("reach", "state", "words"),
    [
        (DialBackReply("192.0.2.2", ((4001, "open"),)), "ok", "direct: other peers dial 192.0.2.2 port 4001"),
        (DialBackReply("203.0.113.7", ((4001, "open"),)), "ok", "mapped port: other peers dial 203.0.113.7"),
        (DialBackReply("203.0.113.7", ((4001, "timeout"),)), "warning", "behind NAT"),
        (DialBackReply("192.0.2.2", ((4001, "refused"),)), "warning", "port 4001 refused"),
        (DialBackReply("", ()), "warning", "only through a relay"),
        (None, "warning", "no peer could test"),
    ],
)
def test_reachability(reach: DialBackReply | None, state: str, words: str) -> None:
    finding = reach_finding(reach, own=("192.0.2.2",))
    assert finding.state == state and words in finding.detail
    assert ("NAT" in finding.detail) == ("NAT" in words)
    assert bool(finding.remedy) == (state == "warning")


def test_a_second_best_way_says_why_it_is_not_better() -> None:
    closed = DialBackReply("203.0.113.7", ((4001, "timeout"),))
    punched = reach_finding(closed, (), punched=True, relay="/ip4/192.0.2.9/tcp/1/p2p-circuit")
    assert punched.detail.startswith("punched: ") and "port 4001 timeout" in punched.detail
    relayed = reach_finding(closed, (), relay="/ip4/192.0.2.9/tcp/1/p2p-circuit")
    assert relayed.detail.startswith("relayed: through /ip4/192.0.2.9") and "behind NAT" in relayed.detail
    assert {punched.state, relayed.state} == {"ok"} and punched.remedy == relayed.remedy != ""


@pytest.mark.parametrize(
    ("seen_at", "outcomes", "sound"),
    [
        ("203.0.113.7", ((4001, "open"),), True),
        ("2001:db8::1", (), True),
        ("", (), True),
        ("\x1b[2J", ((4001, "open"),), False),
        ("203.0.113.7", ((1 << 40, "open"),), False),
        ("203.0.113.7", ((4001, "open"),) * 100, False),
    ],
)
def test_a_report_that_is_no_answer_is_not_shown(
    seen_at: str, outcomes: tuple[tuple[int, Outcome], ...], sound: bool
) -> None:
    assert answers(DialBackReply(seen_at, outcomes), (4001, 4002)) == sound


def test_an_error_becomes_a_finding() -> None:
    finding = failure("admission", NotAdmitted("the token expired 3 hours ago: ask for a new invite"))
    assert (finding.detail, finding.remedy) == ("the token expired 3 hours ago", "ask for a new invite")
    assert finding.exit_code == 4


async def test_that_no_address_answers_is_reported_once(tmp_path: Path) -> None:
    absent = Identity.generate().peer_id
    with trio.socket.socket() as closed:
        await closed.bind(("127.0.0.1", 0))
        address = f"/ip4/127.0.0.1/tcp/{closed.getsockname()[1]}/p2p/{absent}"
        invite = Invite("a" * 32, absent, (address, address.replace("127.0.0.1", "127.0.0.2")))
        findings = [finding async for finding in swarm_findings(joining(tmp_path, invite, reach=LOCAL), None)]
    (finding,) = findings
    assert finding.check == "bootstrap" and is_failure(finding, 3)
    assert finding.detail.startswith("refused") and "none of the 2 addresses" in finding.detail
    assert "peer invite" in finding.remedy


def test_a_stale_address_beside_one_that_answers_is_a_warning() -> None:
    answers, silent = Finding("bootstrap", "ok", "here"), Finding("bootstrap", "failure", "timeout: there", "wait", 3)
    other = Finding("bootstrap", "failure", "wrong_peer: there", "ask", 3)
    first, second = judged([answers, silent])
    assert first == answers and (second.state, second.detail, second.exit_code) == ("warning", "timeout: there", 0)
    (found,) = judged([silent, other])
    assert found.state == "failure" and found.detail.startswith("wrong_peer") and found.exit_code == 3
    (alone,) = judged([silent])
    assert alone.detail == "timeout: there"
    assert judged([]) == []


def test_it_says_what_a_leader_of_a_full_group_sends() -> None:
    manifest = make_manifest(Identity.generate().peer_id)
    (found,) = leader_findings(manifest, [])
    assert found.state == "ok" and re.fullmatch(
        r"of 64 peers sends \S+ [kM]B a round besides its exchange", found.detail
    )
    (timed,) = leader_findings(manifest, [0.0, 0.1, 0.2, 0.1])
    seconds = manifest.outer.steps / 0.1
    assert timed.state == "ok" and timed.detail.endswith(f" Mbit/s in rounds of {duration_text(seconds)}")
    (quick,) = leader_findings(manifest, [1000.0 * manifest.outer.steps])
    assert quick.state == "warning" and "max_peers" in quick.remedy
    alone = msgspec.structs.replace(manifest, outer=GossipConfig(), codec=CodecConfig())
    assert list(leader_findings(alone, [1.0])) == [], "none leads"


def test_the_confinement_of_workers_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {finding.check: finding for finding in confinement_findings()}
    assert list(found) == ["environment", "core dumps", "privileges", "landlock", "seccomp"]
    assert (found["core dumps"].detail, found["privileges"].detail) == ("forbidden", "no new ones")
    assert all(bool(finding.remedy) == (finding.state == "warning") for finding in found.values())
    monkeypatch.setenv("BARNRAISE_SANDBOX", "off")
    off = {finding.check: finding for finding in confinement_findings()}
    assert (off["landlock"].state, off["landlock"].remedy) == ("warning", "unset BARNRAISE_SANDBOX")


def test_a_system_without_confinement_can_take_part() -> None:
    for name in ("privileges", "landlock", "seccomp"):
        found = confinement_finding(Restriction(name, False, NOT_HERE))
        assert (found.state, found.detail, found.exit_code) == ("warning", "not on this system", 0)
        assert "a user of its own" in found.remedy
    assert environment_finding({"PATH": "", "SSH_AUTH_SOCK": ""}).detail == "1 of 2 variables reach a worker"


def test_a_run_that_needs_text_of_ones_own_wants_it_as_join_does(tmp_path: Path) -> None:
    whole, stages = (
        msgspec.structs.replace(manifest, data=msgspec.structs.replace(manifest.data, source="folder"))
        for manifest in (manifest_of(Identity.generate(), count) for count in (1, 3))
    )
    with pytest.raises(ConfigError) as stops_join:
        check_join(joining(tmp_path), whole)
    (found,) = source_findings(whole, joining(tmp_path))
    assert is_failure(found, stops_join.value.exit_code) and "--data PATH" in found.remedy
    assert f"{found.detail}: {found.remedy}" == str(stops_join.value)
    assert not list(source_findings(manifest_of(Identity.generate(), 1), joining(tmp_path)))
    assert not list(source_findings(stages, joining(tmp_path)))  # a later stage reads none
    assert list(source_findings(stages, joining(tmp_path, role="feeder")))


async def test_the_text_is_described_with_a_run_and_without(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": f"text {number}\n"}) + "\n" for number in range(500))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "b.docx").touch()
    alone = await text_finding(OwnText(str(tmp_path)))
    assert alone.state == "ok" and alone.detail.startswith("1 file (500 texts) read, ") and "1 .docx" in alone.detail
    manifest = manifest_of(Identity.generate(), 1)
    assert "tokens of the run's tokenizer" in (await text_finding(OwnText(str(tmp_path / "a.jsonl")), manifest)).detail
    (tmp_path / "a.jsonl").write_text("")
    missing = await text_finding(OwnText(str(tmp_path)))
    assert missing.state == "failure" and missing.exit_code == 2 and "add text" in missing.remedy
