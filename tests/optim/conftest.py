"""One torch thread, as vectors here are small and the machine is shared, and the same random numbers in every run."""

from __future__ import annotations

import pytest
import torch

from optim.strategies import dense, sparse

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several slices for a small problem, no parameter cut in two."""
    for module, name, value in [(dense, "SLICE_VALUES_MIN", 8), (dense, "SLICE_VALUES_MAX", 100)]:
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(sparse, "SLICE_VALUES_MAX", 100)
