"""Which blocks the servers of a benchmark have."""

from __future__ import annotations

import pytest

from benchmarks.serving.inference import parts


@pytest.mark.parametrize(
    ("servers", "blocks"),
    [(1, ["0:8"]), (2, ["0:4", "4:8"]), (3, ["0:2", "2:5", "5:8"]), (8, [f"{n}:{n + 1}" for n in range(8)])],
)
def test_the_servers_have_all_blocks_and_none_twice(servers: int, blocks: list[str]) -> None:
    assert list(parts(8, servers).values()) == blocks
