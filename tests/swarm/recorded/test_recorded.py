"""What earlier releases have written, read by this one. `record.py` has made each folder; none is ever changed."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from cli.progress.event_tail import EventTail
from cli.progress.progress import Progress
from dht.records import open_record
from optim.strategies.registry import build_strategy
from peer.identity import Identity, Signed
from swarm.inference.record import SERVERS, ServerRecord, servers_key
from swarm.membership.member_record import MEMBERS, MemberRecord
from swarm.placement.stages import layout_of
from swarm.protocol.agreement.proof import HeadProof, ProofChecker
from swarm.protocol.agreement.records import BALLOT_KEY, BallotRecord, is_damaged, links_in
from swarm.protocol.head import Head
from swarm.protocol.signer import KeySigner
from swarm.rounds.building import StateBuilder
from swarm.rounds.context import RoundContext
from swarm.rounds.records import RecordFiles
from swarm.rounds.result_log import ResultLog, path_between
from swarm.run.agreement import agreement_config, schedule_of
from swarm.run.home import Home
from swarm.run.invite import Invite
from swarm.run.manifest import OLDEST_SPOKEN, PROTOCOL_VERSION, Manifest, open_manifest, open_served_manifest
from swarm.run.manifest_transfer import load_run_files
from swarm.state.outer_state import OuterState
from swarm.training.saved_models import newest_model

HERE = Path(__file__).parent


@dataclass
class Recorded:
    """What one release has written, in a folder that a test may change."""

    path: Path

    @cached_property
    def facts(self) -> dict[str, Any]:
        return cast("dict[str, Any]", json.loads((self.path / "facts.json").read_text()))

    @property
    def home(self) -> Home:
        return Home(self.path / "home")

    @property
    def manifest(self) -> Manifest:
        run_files = load_run_files(self.home.path)
        assert run_files is not None
        return open_manifest(run_files[0], self.facts["run_id"])

    @property
    def head(self) -> Head:
        return self.read("head.msgpack", Head)

    @property
    def checker(self) -> ProofChecker:
        identity = Identity.load_or_create(self.home.identity)
        return ProofChecker(agreement_config(self.manifest, 0, identity.peer_id), KeySigner(identity))

    def read(self, name: str, kind: Any) -> Any:
        return msgspec.msgpack.decode((self.path / name).read_bytes(), type=kind)


@pytest.fixture(params=range(OLDEST_SPOKEN, PROTOCOL_VERSION + 1))
def recorded(request: pytest.FixtureRequest, tmp_path: Path) -> Recorded:
    folder = HERE / f"protocol-{request.param}"
    assert folder.is_dir(), "record what this release writes: python -m tests.swarm.recorded.record"
    shutil.copytree(folder, tmp_path / "recorded")
    found = Recorded(tmp_path / "recorded")
    found.home.identity.chmod(0o600)  # git keeps no such modes
    return found


def test_the_manifests(recorded: Recorded) -> None:
    manifest = recorded.manifest
    assert (manifest.run_id, manifest.name) == (recorded.facts["run_id"], "harness")
    served = open_served_manifest(recorded.read("served.msgpack", Signed), recorded.facts["served_id"])
    assert (served.name, served.window, served.dtype, served.text.stops) == ("a served model", 64, "bf16", (3,))


def test_the_invite(recorded: Recorded) -> None:
    invite = Invite.parse(recorded.home.invite.read_text())
    assert (invite.run_id, invite.authority) == (recorded.facts["run_id"], recorded.manifest.authority)


def test_the_records_of_a_member_and_of_a_server(recorded: Recorded) -> None:
    facts, schemas = recorded.facts, {schema.name: schema for schema in (MEMBERS, SERVERS)}
    member = open_record(recorded.read("member.msgpack", Signed), facts["run_id"], schemas)
    assert isinstance(member.value, MemberRecord)
    assert (member.signer, member.value.round) == (facts["peer"], facts["round"])
    server = open_record(recorded.read("server.msgpack", Signed), facts["served_id"], schemas)
    assert isinstance(server.value, ServerRecord)
    assert (server.body.key, server.value.end) == (servers_key(facts["served_id"]), 2)


def test_the_head_and_its_proof(recorded: Recorded) -> None:
    facts, head = recorded.facts, recorded.head
    assert (head.hash.hex(), head.state_hash.hex(), head.round) == (facts["head"], facts["state_hash"], facts["round"])
    recorded.checker.check(head, recorded.read("proof.msgpack", HeadProof))


def test_the_home_has_its_model_and_its_promises(recorded: Recorded) -> None:
    model = newest_model([recorded.home.path])
    (checkpoint,) = model.parts
    assert checkpoint.round == recorded.facts["checkpoint_round"] and model.theta.isfinite().all()
    records = RecordFiles(recorded.home.agreement).read()
    assert not is_damaged(records)
    msgspec.msgpack.decode(records[BALLOT_KEY], type=BallotRecord)
    assert links_in(records)[-1].link.head == recorded.head
    recorded.checker.check(recorded.head, recorded.checker.prove(records, recorded.head.hash))


async def test_the_results_in_the_home_lead_to_its_head(recorded: Recorded) -> None:
    """From the checkpoint, bit by bit: the arithmetic of a merge is the number's, too."""
    manifest, head = recorded.manifest, recorded.head
    (checkpoint,) = newest_model([recorded.home.path]).parts
    strategy = build_strategy(manifest.outer, manifest.codec, layout_of(manifest, 0), manifest.inner)
    state = OuterState.in_memory(list(checkpoint.tensors.values()), strategy)
    log = ResultLog(recorded.home.path / "results")
    context = cast(RoundContext, SimpleNamespace(state=state, schedule=schedule_of(manifest, 0)))
    builder = StateBuilder(context, log)
    path = path_between(log.load(), state.tree.root, head.state_hash)
    assert path
    for result in path:
        assert await builder.advance(result)
    assert state.tree.root == head.state_hash


def test_the_events(recorded: Recorded) -> None:
    progress, seen = Progress("recorded"), set[str]()
    for at, name, fields in EventTail(recorded.home.events).poll():
        progress.apply("first", name, at, fields)
        seen.add(name)
    assert sorted(seen) == recorded.facts["events"] and not progress.odd
    assert progress.peer("first").round >= recorded.facts["checkpoint_round"]
