"""A hundred honest calls a second beside each flood: all are answered, and memory and files come back. How quick they
stay is for `make soak`, and so are most floods here: tests/peer/net/test_hostile.py, test_budgets.py and
tests/dht/test_hostile.py have each of them, more of it, without a command's process."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.flood_scene import FLOODS, Scene, endure, open_scene

pytestmark = pytest.mark.process
SOON = ("handshakes", "pushes")  # what costs a victim most processor time, and most memory


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with open_scene(tmp_path_factory.mktemp("floods")) as scene:
        yield scene


@pytest.mark.parametrize("flood", [pytest.param(f, marks=[] if f in SOON else pytest.mark.soak) for f in FLOODS])
def test_a_flood_takes_no_call_and_keeps_no_memory(scene: Scene, flood: str) -> None:
    endure(scene, flood, flood_s=0.5)
