"""Two hundred identities of one host, of one kind at a time, in an open and in a closed run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.crowd import crowded_run

pytestmark = [pytest.mark.soak, pytest.mark.process]


@pytest.mark.parametrize("mode", ["connect", "node", "record", "ask"])
@pytest.mark.parametrize("is_open", [True, False], ids=["open", "closed"])
async def test_two_hundred_identities_of_one_host(tmp_path: Path, is_open: bool, mode: str) -> None:
    print(await crowded_run(tmp_path, is_open=is_open, identities=200, hosts=25, seconds=60, modes=[mode], join_s=15.0))
