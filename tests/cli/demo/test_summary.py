"""What `peer quickstart` prints at its end."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import pytest

from cli.commands.quickstart import _summarize
from cli.demo.report import Report, StageReport
from cli.progress.micro_batch_audit import MicroBatches
from swarm.run.home import Home

WHOLE = Report(
    rounds_committed=4,
    rounds_discarded=1,
    peers={"id1": {"name": "peer-1", "bytes_up": 3_000_000}, "id2": {"name": "peer-2", "bytes_up": 1_000_000}},
    state_hash="abcdef",
    val_loss_first=5.5,
    val_loss_last=2.5,
    val_losses={"0": 5.5, "4": 2.5},
    tokens=2_000_000,
    parameters=10,
    inner_steps=100,
    ddp_bytes_equivalent=600_000_000,
    traffic_factor=200.0,
    killed=[],
    added=[],
    sample="def x",
    wall_s=60.0,
    broken_invariants=[],
)


def test_summary_of_a_whole_model(capsys: pytest.CaptureFixture[str]) -> None:
    _summarize(WHOLE, Path("q"))
    text = capsys.readouterr().out
    assert "4 rounds committed, 1 discarded: 2.0 million tokens in 60 s." in text
    assert "No peer sent more than 3.0 MB, 200 times less than with an fp32 all-reduce after every step" in text
    assert f"peer export {Home(Path('q/peer-1')).option} --out model" in text and "micro-batch" not in text


def test_the_printed_command_can_be_pasted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = Path(sys.executable).with_name("peer")
    folder = own.parents[2]
    for path, place, typed in (
        (own.parent, folder, "peer"),
        (tmp_path, folder, str(own)),
        (tmp_path, tmp_path, str(own)),
    ):
        monkeypatch.setenv("PATH", str(path))
        monkeypatch.chdir(place)
        _summarize(WHOLE, Path("my runs"))
        export = f"\n  {typed} export --home '{place}/my runs/peer-1' --out model"
        assert capsys.readouterr().out.endswith(f"{export}\n  {typed} chat --model model\n")


def test_summary_of_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    stages = [
        StageReport(
            stage=stage,
            round=4,
            state_hash=f"{stage}" * 64,
            replicas=[f"id{stage + 1}"],
            merged=80 - 9 * stage,
            lost=7 * stage,
            uncounted=2 * stage,
        )
        for stage in range(2)
    ]
    counts = MicroBatches(dispatched=90, completed=88, retried=3, double_counted=0, lost=0, undone=0)
    _summarize(msgspec.structs.replace(WHOLE, stages=stages, micro_batches=counts), Path("q"))
    text = capsys.readouterr().out
    assert "90 micro-batches dispatched, 88 completed, 3 retried; 0 counted twice, 0 lost." in text
    assert "Weights: stage 0 at 00000000 (1 peer), stage 1 at 11111111 (1 peer)." in text
    assert "Merged by the stages: 80, 71. Declared lost: 7 at stage 1. Uncounted: 2 at stage 1." in text
    assert "All peers together sent 4.0 MB, 2 bytes a token" in text and "all-reduce" not in text
    assert f"peer export {Home(Path('q/peer-1')).option} {Home(Path('q/peer-2')).option} --out model" in text
