"""A terminal of 80 columns holds every table of every command: no line is longer, no cell is cut, whatever the figures.

The live views of join, coordinate and top have pictures of their own (test_widths.py).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

import msgspec
import pytest
from msgspec.structs import replace

from cli.commands import ls
from cli.known_homes import KnownHome
from cli.readings import print_state
from cli.terminal.screen import table_screen
from cli.views.plan import show_plan
from cli.views.serving_plan import show_serving_plan
from optim.config import CodecConfig, DilocoConfig
from peer.config import DataConfig, InnerConfig, ModelConfig
from peer.footprint.cards import CARDS
from swarm.membership.vote_shares import InviteStatus, VoteShare
from swarm.placement.costs import RunShape, cut
from swarm.placement.machine_plan import Machine, plan_for
from swarm.run.sections import PipelineConfig
from swarm.serving.memory import plan_serving
from swarm.status.judged import JudgedStatus
from swarm.status.state import (
    BlockRow,
    MemberClaims,
    MemberFacts,
    MemberSeen,
    MemberState,
    MonitorState,
    StageClaims,
    StageFacts,
    StageSeen,
    StageState,
    Verdict,
)
from tests.swarm.status.scenes import WATCH
from tools import what_fits

ROOT = Path(__file__).parents[3]
COLUMNS = 80
NAME = "a-workstation-whose-owner-likes-long-names"
PEER = "12D3KooWQVu1Ce6nG6dQ8Sw9DtfBqdYqkSNpT6L9gLz9bXk1abcd"
PHASE = "waiting for the contributions of 12 members"
WIDE = {str: "f" * 64, int: 123_456, float: 12_345.6, bool: False, list: [], tuple: ()}
"""A wide value for a field of that type."""
T = TypeVar("T", bound=msgspec.Struct)


def wide(of: type[T], **chosen: Any) -> T:
    """Return a struct whose fields have long texts and large figures, but for those that are chosen."""
    hints = {name: hint for name, hint in get_type_hints(of).items() if name in of.__struct_fields__}
    return of(**{name: chosen[name] if name in chosen else _wide_value(hint) for name, hint in hints.items()})


def _wide_value(hint: Any) -> object:
    kind = next((part for part in get_args(hint) if part in WIDE), hint) if type(None) in get_args(hint) else hint
    return WIDE[get_origin(kind) or kind]


CLAIMS = wide(
    MemberClaims, name=NAME, role="full", phase=PHASE, bytes_up=10**12, bytes_down=10**12, age_s=9.0, ready_in_s=599.0,
    first=110, end=128, kv_used=1.0, commits=(123_456, 123_455), wire=(),
)  # fmt: skip
SEEN = MemberSeen(answers=True, events="silent", link="direct")
MEMBER = MemberState(
    peer=PEER, facts=MemberFacts(membership="member", merged=123_456, missed=1234), seen=SEEN, claims=CLAIMS
)  # fmt: skip
STAGE = StageState(
    stage=63, first=110, end=128, facts=wide(StageFacts, members=1024, quorum=513),
    seen=StageSeen(answering=1024, margin=511, commit_age_s=9.0, round_s=9.0),
    claims=wide(StageClaims, replicas=1024, arriving=12, phase=PHASE),
)  # fmt: skip
RUN_ID = "rv3ik7vjyndcycrf3zy5p2j7jtha3j5c"
STATE = MonitorState(
    kind="run", at=0.0, run_id=RUN_ID, name="a run with quite a long name, as some people like them", open=False,
    rounds_planned=123_456, round=123_455, tokens=10**15, val_loss=12_345.6, val_round=123_455, dtype="bf16",
    verdict=Verdict(level="good", word="healthy", reason="members answer " * 9, remedy="wait " * 30, basis=("seen",)),
    members=(MEMBER, MEMBER), stages=(STAGE,), names={PEER: NAME}, monitor=WATCH, silent=(PEER,),
    judged=(wide(JudgedStatus, peer=PEER, judges=[PEER], left_out_by=[PEER]),), judges=3,
    shares=(wide(VoteShare, prefix="", stage=None, is_only=True),), guests=(wide(InviteStatus, peers=(PEER, PEER)),),
    cautions=("a caution that is told in quite a long sentence, " * 3,),
    troubles=("no server holds blocks 3 to 9: serve them (`peer serve`)",),
    blocks=(BlockRow(first=110, end=128, servers=12, arriving=12, leaving=12, peers=(PEER,) * 12),),
)  # fmt: skip


def homes() -> None:
    """Draw what `peer ls` does of homes with long names and paths."""
    path = Path("/home/ann/work/experiments/2026/november/barnraise-homes") / NAME
    table_screen(COLUMNS).print(ls._table([KnownHome(path, "coordinator", NAME, RUN_ID, is_running=True)] * 2))


def status(guests: bool = False, **changed: Any) -> Callable[[], None]:
    return lambda: print_state(replace(STATE, **changed), as_json=False, guests=guests)


def plan() -> None:
    """Draw what `peer plan` does of a model that many machines share."""
    model = replace(what_fits.MODELS["Llama 3.1 8B"], max_seq_len=131_072)
    card = CARDS["rtx4090"]
    machine = Machine("cuda", card.memory_bytes, 1e12, card.flops, 1e6, narrow=True, devices=8, layout="fsdp")
    inner, pipeline = InnerConfig(lr=1e-3, batch_size=512, total_steps=1), PipelineConfig(stages=2, micro_batch=8)
    cuts, outer, data = cut(2, model, 131_072), DilocoConfig(steps=100_000), DataConfig(seq_len=131_072)
    shape = RunShape(model, data, inner, outer, CodecConfig(), pipeline, cuts)
    show_plan(plan_for(shape, machine, 1024, tokens=15e12))


def plan_to_serve() -> None:
    """Draw what `peer plan --serve` does of a model that many machines share."""
    model = ModelConfig(
        vocab_size=128_256, hidden_size=16_384, layers=126, heads=128, kv_heads=8, intermediate_size=53_248,
        max_seq_len=131_072,
    )  # fmt: skip
    show_serving_plan(plan_serving(model, "bf16", "nf4", "cpu", 96e9))


SCENES: dict[str, Callable[[], None]] = {
    "ls": homes,
    "plan": plan,
    "plan --serve": plan_to_serve,
    "status": status(),
    "status of stages": status(stages=(STAGE, STAGE)),
    "status that waits": status(round=None, val_loss=None),
    "status --guests": status(guests=True),
    "status of a served run": status(servers=(MEMBER,), served_round=123_456),
    "status of a served model": status(kind="model", name="meta-llama/Llama-3.1-405B-Instruct"),
}
DRAWN = {"cli/commands/ls.py", "cli/views/plan.py", "cli/views/serving_plan.py"}


def test_every_table_is_looked_at() -> None:
    files = [path for path in (ROOT / "cli").rglob("*.py") if re.search(r"\bTable\(", path.read_text())]
    assert {str(path.relative_to(ROOT)) for path in files} == DRAWN


@pytest.mark.parametrize("scene", SCENES)
def test_the_tables_fit(scene: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", str(COLUMNS))
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    monkeypatch.setenv("NO_COLOR", "1")
    SCENES[scene]()
    lines = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()
    assert len(lines) > 1
    assert [line for line in lines if len(line) > COLUMNS] == []
    assert [line for line in lines if "…" in line] == []
