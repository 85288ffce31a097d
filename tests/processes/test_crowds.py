"""Many identities of one host crowd a run of four peers, in all ways at once; tests/soak has more of them, one way at a
time, and looks at the clock."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crowd import crowded_run

# tests/dht/test_identities.py has them in one process, and tests/swarm/protocol/test_prefix_cap.py their places
pytestmark = [pytest.mark.soak, pytest.mark.process]


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
async def test_a_crowd_hides_no_member_and_keeps_no_newcomer_out(tmp_path: Path, is_open: bool) -> None:
    modes = ("connect", "node", "record", "ask")
    await crowded_run(tmp_path, is_open=is_open, identities=12, hosts=4, seconds=5, modes=modes)
