"""What the tests of commands share."""

from __future__ import annotations

import pytest

from tests.cli.support.typed import Peer, typed


@pytest.fixture
def peer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Peer:
    """Runs `peer ARGUMENTS` in this process."""
    return typed(monkeypatch, capsys)
