"""Torch with one thread: models as tiny as these gain nothing by more, which wait for each other on a busy machine (a
hundred times as long, measured with all cores taken)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
