"""For all tests: in which order they run, and that a slow machine is no failure."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings

# Hypothesis gives an example 0.2 s, and data a second: a machine that stands still for a moment would fail any test.
patient = settings(settings.default, deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("explore", patient)  # `make soak`: new examples each time
settings.register_profile("same", patient, derandomize=True)  # a test that passed fails for a change's sake alone
settings.load_profile("same")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes go first: they take longest, and whoever is done with his share has the rest to do."""
    longest = {item.path for item in items if item.get_closest_marker("process")}
    items.sort(key=lambda item: item.path not in longest)
