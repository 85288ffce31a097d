"""One torch thread, as vectors here are small and the machine is shared, and the same random numbers in every run."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
