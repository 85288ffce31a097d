"""Long runs are not hung runs."""

from __future__ import annotations

import faulthandler

import pytest


@pytest.fixture(autouse=True)
def no_time_limit() -> None:
    """Undo `faulthandler_timeout` of pyproject.toml, which takes a test of five minutes for hung."""
    faulthandler.cancel_dump_traceback_later()
