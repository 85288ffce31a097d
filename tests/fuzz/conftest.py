"""How long a mutation may take: in a soak less."""

from __future__ import annotations

import pytest

from tests.fuzz.support import guard


@pytest.fixture(autouse=True)
def _look_closer_in_a_soak(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("soak"):
        monkeypatch.setattr(guard, "SECONDS_MAX", guard.SOAK_SECONDS_MAX)
