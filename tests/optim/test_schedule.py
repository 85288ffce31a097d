"""When to synchronize: the quadratic rule, and steps by speed."""

from __future__ import annotations

import pytest

from optim.schedule import quadratic_steps, steps_by_speed
from peer.errors import ConfigError


def test_quadratic_rule() -> None:
    assert quadratic_steps(4, 0.02, 0.01) == 4
    assert quadratic_steps(4, 0.031, 0.01) == 9
    assert quadratic_steps(4, 0.035, 0.01) == 12
    with pytest.raises(ConfigError, match="min_lr_share"):
        quadratic_steps(4, 0.02, 0.0)


def test_steps_by_speed() -> None:
    assert steps_by_speed(50, [1.0, 0.5, 0.251, 0.001]) == (50, 25, 12, 1)
    with pytest.raises(ConfigError, match="measure"):
        steps_by_speed(50, [1.0, 0.0])
