"""For the tests of the gateway: the memory of a template's process is bounded closely, and a forked one has that of all
that was imported before."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _forked_workers() -> None:
    """Fork no worker here."""
