"""The basis that all members derive from the shared momentum."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from optim.algorithms.shared_basis import BASIS_BITS, VALUE_BITS, integers, shared_basis


def basis(matrix: torch.Tensor, rank: int, of_rows: bool, seed: int = 1) -> torch.Tensor:
    return shared_basis(matrix, rank, seed, of_rows) * 2.0**-BASIS_BITS


@pytest.mark.parametrize("of_rows", [True, False])
@pytest.mark.parametrize("scale", [0.0, 1e-38, 1.0, 1e30])
def test_it_is_orthonormal_whatever_the_matrix(of_rows: bool, scale: float) -> None:
    matrix = (torch.randn(60, 3) @ torch.randn(3, 90)) * scale  # its rank is below the one asked for
    q = basis(matrix, 8, of_rows)
    assert q.shape == ((90, 8) if of_rows else (60, 8))
    assert torch.allclose(q.T @ q, torch.eye(8, dtype=torch.float64), rtol=0, atol=1e-5)


@pytest.mark.parametrize("of_rows", [True, False])
def test_it_holds_the_space_of_a_matrix_of_low_rank(of_rows: bool) -> None:
    matrix = torch.randn(300, 4) @ torch.randn(4, 200)
    whole = (matrix if of_rows else matrix.T).double()
    q = basis(matrix, 4, of_rows)
    assert float((whole - whole @ q @ q.T).norm()) < 0.15 * float(whole.norm())
    other = basis(torch.randn(300, 200), 4, of_rows)
    assert float((whole - whole @ other @ other.T).norm()) > 0.9 * float(whole.norm())


def test_integers_are_exact_in_products() -> None:
    """Of the largest sizes allowed; python's integers are the reference."""
    x, scale = integers(torch.randn(7, 50) * 3e-5, VALUE_BITS)
    assert float(x.abs().max()) <= 2**VALUE_BITS and torch.equal(x, x.round())
    y = torch.full((50, 2), 2.0**12)
    exact = np.array(x.long().tolist(), dtype=object) @ np.array(y.long().tolist(), dtype=object)
    assert (x @ y.double()).long().tolist() == exact.tolist()
    assert VALUE_BITS + 12 + 20 < 53 and VALUE_BITS + BASIS_BITS + 10 < 53
    assert scale == 2.0 ** round(np.log2(scale))


def test_rounds_start_elsewhere_while_there_is_no_momentum() -> None:
    nothing = torch.zeros(40, 30)
    first, again, second = (basis(nothing, 2, True, seed) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert float((first.T @ second).abs().max()) < 0.8
