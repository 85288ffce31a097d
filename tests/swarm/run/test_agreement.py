"""What a manifest fixes about the agreement of its groups."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from optim.config import DilocoConfig
from peer.config import ModelConfig
from peer.identity import Identity, public_key_of
from swarm.run.agreement import agreement_config, invite_serial, schedule_of
from swarm.run.credentials import sign_link
from swarm.run.manifest import Manifest
from swarm.run.sections import PipelineConfig, RunRules
from tests.swarm.run.test_manifest import make_manifest

PEER = Identity.generate()
AUTHORITY = Identity.generate()
TWO_STAGES = {
    "model": ModelConfig(
        hidden_size=32, layers=2, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64, tie_embeddings=False
    ),
    "pipeline": PipelineConfig(stages=2),
    "cuts": ((0, 1), (1, 2)),
    "genesis": (bytes(32), b"\1" * 32),
}


def manifest_of(rules: dict[str, object], **sections: object) -> Manifest:
    return make_manifest(AUTHORITY.peer_id, run=RunRules(**{"name": "x", **rules}), **sections)


@pytest.mark.parametrize(
    ("rules", "sections", "mode"),
    [
        ({}, {}, "witness"),
        ({}, TWO_STAGES, "required"),
        ({"coordinator": "witness"}, TWO_STAGES, "witness"),
        ({"coordinator": "required"}, {}, "required"),
        ({"faults_tolerated": 1, "min_peers": 4}, {}, "open"),
    ],
)
def test_the_mode_follows_from_the_rules_of_the_run(
    rules: dict[str, object], sections: dict[str, object], mode: str
) -> None:
    assert manifest_of(rules, **sections).agreement_mode == mode


def test_liars_are_tolerated_in_runs_of_one_stage_only() -> None:
    with pytest.raises(ValueError, match="faults_tolerated is 1: leave it out"):
        manifest_of({"faults_tolerated": 1, "min_peers": 4}, **TWO_STAGES)


def test_a_group_gets_the_rules_of_its_stage() -> None:
    manifest = manifest_of({"min_peers": 5, "max_peers": 9, "rounds": 7}, **TWO_STAGES)
    config = agreement_config(manifest, 1, PEER.peer_id)
    assert config.genesis == manifest.first_head(1) and config.coordinator == AUTHORITY.peer_id
    assert (config.peer, config.mode, config.rounds, config.max_peers) == (PEER.peer_id, "required", 7, 9)
    assert config.min_peers == 1, "all stages together have the five"
    assert agreement_config(manifest_of({"min_peers": 5}), 0, PEER.peer_id).min_peers == 5


def test_the_schedule_is_that_of_the_manifest() -> None:
    schedule = schedule_of(manifest_of({}, outer=DilocoConfig(steps=3)), 0)
    assert schedule.seq_len == 64 and not schedule.synchronous


@pytest.mark.parametrize(("guests", "has_serial"), [(1, True), (2, False)])
def test_an_invite_for_one_peer_has_one_vote(guests: int, has_serial: bool) -> None:
    invite = Identity.generate()
    key = public_key_of(invite.peer_id)
    link = sign_link(AUTHORITY, "run", "invite", key, guests=guests, expires=2e9)
    member = sign_link(invite, "run", "member", public_key_of(PEER.peer_id), guests=0, expires=2e9)
    serial = invite_serial(SimpleNamespace(chain=(link, member)))  # type: ignore[arg-type]
    assert bool(serial) == has_serial and len(serial) <= 64
    assert invite_serial(SimpleNamespace(chain=())) == ""  # type: ignore[arg-type]
