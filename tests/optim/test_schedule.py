"""The quadratic rule."""

from __future__ import annotations

import pytest

from optim.schedule import quadratic_steps
from peer.errors import ConfigError


def test_quadratic_rule() -> None:
    assert quadratic_steps(4, 0.02, 0.01) == 4
    assert quadratic_steps(4, 0.031, 0.01) == 9
    assert quadratic_steps(4, 0.035, 0.01) == 12
    with pytest.raises(ConfigError, match="min_lr_share"):
        quadratic_steps(4, 0.02, 0.0)
