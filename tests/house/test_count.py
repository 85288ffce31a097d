"""`tools/count.py` measures how large the product is."""

from __future__ import annotations

from tests.house.source import ROOT, modules
from tools.count import Size, size, sizes

MODULE = """
class Mine:
    declared: int

    def __init__(self, other):
        self.set = 0
        self.other = other
        other.theirs = 1

class _Private:
    def change(self, mine):
        mine.set = 1
        mine.declared += 1
        self.mine.away, _ = 1, 2
"""


def test_it_counts_a_module() -> None:
    assert size(MODULE) == Size(lines=14, files=1, public_classes=1, outside_assignments=2)


def test_it_sums_up_the_packages() -> None:
    found = sizes(ROOT)
    assert found["total"].files == len(modules())
    assert found["total"] == Size(*map(sum, zip(*list(found.values())[:-1], strict=True)))
