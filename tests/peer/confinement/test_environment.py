"""The variables that reach a worker."""

from __future__ import annotations

import pytest

from peer.confinement.environment import passed_on


@pytest.mark.parametrize(
    "name",
    ["PATH", "LANG", "LC_ALL", "CUDA_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION", "TORCH_LOGS", "OMP_PROC_BIND"],
)
def test_what_computing_needs_is_passed_on(name: str) -> None:
    assert passed_on({name: "1"}) == {name: "1"}


@pytest.mark.parametrize(
    "name", ["OPENAI_API_KEY", "SSH_AUTH_SOCK", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "HOME", "DISPLAY", "path", "XPATH"]
)
def test_nothing_else_is(name: str) -> None:
    assert passed_on({name: "1"}) == {}


@pytest.mark.parametrize("name", ["NVIDIA_API_KEY", "NGC_TOKEN", "CUDA_PASSWORD", "TORCH_AUTH"])
def test_no_secret_of_a_known_family_is(name: str) -> None:
    assert passed_on({name: "1"}) == {}
