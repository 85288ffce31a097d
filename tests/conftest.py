"""For all tests: in which order they run."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes go first: they take longest, and whoever is done with his share has the rest to do."""
    longest = {item.path for item in items if item.get_closest_marker("process")}
    items.sort(key=lambda item: item.path not in longest)
