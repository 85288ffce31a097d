"""Fixtures of tests/peer."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support.forking.forked import forked_workers


@pytest.fixture(autouse=True)
def _seeded() -> None:
    """Seed torch alike for every test."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of text to train on, a few tens of kilobytes."""
    folder = tmp_path_factory.mktemp("text")
    for k in range(20):
        (folder / f"{k}.txt").write_text("".join(f"{k} bottles of beer on wall {line}.\n" for line in range(60)))
    return folder


@pytest.fixture
def forked() -> Iterator[None]:
    """Let the workers of a test be forked: one that looks at no start, no confinement and no memory."""
    with forked_workers():
        yield
