"""Many identities of one host crowd a run of four peers. All of them, and at once, here; one kind at a time in soak."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crowd import crowded_run

pytestmark = pytest.mark.process


@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
async def test_a_crowd_hides_no_member_and_keeps_no_newcomer_out(tmp_path: Path, is_open: bool) -> None:
    modes = ("connect", "node", "record", "ask")
    await crowded_run(tmp_path, is_open=is_open, identities=24, hosts=6, seconds=5, modes=modes, join_s=60.0)
