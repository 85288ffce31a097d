"""The roles and stages that `peer join` accepts for a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from peer.config import ModelConfig
from peer.errors import ConfigError
from peer.identity import Identity
from swarm.run.invite import Invite
from swarm.run.manifest import Manifest
from swarm.run.peer_context import JoinConfig, Role
from swarm.run.sections import PipelineConfig
from swarm.training.join_checks import check_role
from tests.swarm.run.test_manifest import make_manifest


def run_of(stages: int) -> Manifest:
    model = ModelConfig(
        hidden_size=32, layers=stages, heads=2, kv_heads=1, intermediate_size=64, max_seq_len=64, tie_embeddings=False
    )
    return make_manifest(
        Identity.generate().peer_id,
        model=model,
        pipeline=PipelineConfig(stages=stages),
        cuts=tuple((stage, stage + 1) for stage in range(stages)),
        genesis=(bytes(32),) * stages,
    )


def join(manifest: Manifest, role: Role, stage: int | None) -> JoinConfig:
    return JoinConfig(Path("home"), Invite(manifest.run_id, manifest.authority, ()), role=role, stage=stage)


@pytest.mark.parametrize(
    ("stages", "role", "stage"),
    [(1, "auto", None), (1, "full", None), (3, "auto", None), (3, "stage", 2), (3, "auto", 0), (3, "feeder", None)],
)
def test_possible_roles_are_accepted(stages: int, role: Role, stage: int | None) -> None:
    manifest = run_of(stages)
    check_role(join(manifest, role, stage), manifest)


@pytest.mark.parametrize(
    ("stages", "role", "stage", "remedy"),
    [
        (1, "stage", None, "leave out --role and --stage"),
        (1, "feeder", None, "leave out --role and --stage"),
        (1, "auto", 1, "leave out --role and --stage"),
        (3, "full", None, "choose --role stage"),
        (3, "feeder", 1, "leave out either"),
        (3, "stage", 3, "choose 0 to 2"),
    ],
)
def test_impossible_roles_are_refused_with_a_remedy(stages: int, role: Role, stage: int | None, remedy: str) -> None:
    manifest = run_of(stages)
    with pytest.raises(ConfigError, match=remedy):
        check_role(join(manifest, role, stage), manifest)
