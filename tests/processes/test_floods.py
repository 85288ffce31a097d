"""A hundred honest calls a second beside each flood: they stay as quick, and memory and files come back."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.flood_scene import FLOODS, Scene, check_flood, open_scene

pytestmark = pytest.mark.process


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with open_scene(tmp_path_factory.mktemp("floods")) as scene:
        yield scene


@pytest.mark.parametrize("flood", FLOODS)
def test_honest_calls_stay_as_quick_beside_a_flood(scene: Scene, flood: str) -> None:
    check_flood(scene, flood, quiet_s=1.0, flood_s=2.0, clock="cpu_s")
