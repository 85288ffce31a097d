"""For the tests of swarms: one core computes for each, and their compute workers are forked."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support.forking.forked import forked_workers

torch.set_num_threads(1)  # on tensors this small a second thread only waits for the first


@pytest.fixture(autouse=True)
def _forked_workers(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("process") is None:
        yield
        return
    with forked_workers():
        yield
