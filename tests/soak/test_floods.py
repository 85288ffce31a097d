"""Each flood for a minute, at a peer of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.flood_scene import FLOODS, check_flood, open_scene

pytestmark = [pytest.mark.soak, pytest.mark.process]


@pytest.mark.parametrize("flood", FLOODS)
def test_a_minute_of_a_flood(tmp_path: Path, flood: str) -> None:
    with open_scene(tmp_path) as scene:
        check_flood(scene, flood, quiet_s=10.0, flood_s=60.0)
