"""One torch thread: the vectors here are small, and the machine is shared. And the same numbers in every run, whichever
tests ran before."""

from __future__ import annotations

import pytest
import torch

torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
