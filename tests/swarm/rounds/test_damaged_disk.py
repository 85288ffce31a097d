"""A member's process starts again on a damaged disk: it begins all the same, at worst as another voter that fetches."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from peer.identity import Identity
from tests.swarm.rounds.test_driver import deltas
from tests.swarm.support.driven_group import open_driven_group

pytestmark = pytest.mark.slow
Damage = Callable[[bytes], bytes]


def flipped(data: bytes) -> bytes:
    """Change bytes in the middle: of a result these are values, of a record a hash or a signature."""
    middle = len(data) // 2
    return data[:middle] + bytes(255 - byte for byte in data[middle : middle + 64]) + data[middle + 64 :]


def torn(data: bytes) -> bytes:
    return data[: len(data) // 2]


def emptied(data: bytes) -> bytes:
    return b""


RECORDS, RESULTS = "agreement/records.log", "results/*.result"
OFTEN = [(RECORDS, torn), (RESULTS, flipped)]
ALL = [(files, damage) for files in (RECORDS, RESULTS) for damage in (flipped, torn, emptied)]


@pytest.mark.parametrize(
    ("files", "damage"), [one if one in OFTEN else pytest.param(*one, marks=pytest.mark.soak) for one in ALL]
)
async def test_a_member_begins_on_damaged_files(tmp_path: Path, files: str, damage: Damage) -> None:
    identity = Identity.generate()
    async with open_driven_group(tmp_path) as group:
        others = [await group.enter(deltas) for _ in range(2)]
        first = await group.enter(deltas, identity)
        await group.until_round(3)
        await group.leave(first)
        found = list((tmp_path / first.peer).glob(files))
        assert found
        for path in found:
            path.write_bytes(damage(path.read_bytes()))
        again = await group.enter(deltas, identity)
        await group.until(lambda: again.head.has(again.driver.me) and again.head.round > others[0].head.round - 2)
        await group.until_round(max(other.head.round for other in others) + 2, [*others, again])
        group.check([*others, again])
