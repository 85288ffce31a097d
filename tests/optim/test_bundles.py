"""Bundles of slices, and what a message of a large model is committed to with."""

from __future__ import annotations

import math

import pytest
from blake3 import blake3

from optim.bundles import BUNDLES_MAX, Bundles, bundle_hash


@pytest.mark.parametrize("slices", [1, 12, BUNDLES_MAX, BUNDLES_MAX + 1, 480, 481, 3340, 1 << 16])
def test_each_slice_is_in_one_bundle_of_at_most_240(slices: int) -> None:
    bundles = Bundles.at_most(BUNDLES_MAX, slices)
    found = [index for bundle in range(bundles.count) for index in bundles.indices(bundle)]
    assert found == list(range(slices)) and bundles.count <= BUNDLES_MAX
    assert all(index in bundles.indices(bundles.of(index)) for index in range(slices))
    assert bundles.size == 1 or Bundles(slices, bundles.size - 1).count > BUNDLES_MAX, "no larger than needed"


def test_a_bundle_of_one_slice_is_that_slice() -> None:
    hashes, sqnorms = [blake3(bytes([number])).digest() for number in range(5)], [0.1, 0.2, 0.3, 0.4, 0.5]
    alone = Bundles.at_most(BUNDLES_MAX, 5)
    assert alone.hashes(hashes) == tuple(hashes) and alone.sqnorms(sqnorms) == tuple(sqnorms)
    pairs = Bundles(5, 2)
    assert pairs.hashes(hashes) == (
        blake3(hashes[0] + hashes[1]).digest(), blake3(hashes[2] + hashes[3]).digest(), hashes[4],
    )  # fmt: skip
    assert pairs.sqnorms(sqnorms) == (math.fsum([0.1, 0.2]), math.fsum([0.3, 0.4]), 0.5)


def test_the_order_of_slices_is_committed_to() -> None:
    one, other = blake3(b"1").digest(), blake3(b"2").digest()
    assert bundle_hash([one, other]) != bundle_hash([other, one])
