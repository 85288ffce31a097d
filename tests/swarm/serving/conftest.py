"""Sound checkpoints, written once a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.peer.model.people_checkpoints import Bases, sound


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> Bases:
    """Return what writes a sound checkpoint, each one once."""
    pytest.importorskip("transformers")
    made: dict[str, Path] = {}

    def base(family: str, extra: dict[str, Any]) -> Path:
        key = f"{family} {sorted(extra.items())}"
        if key not in made:
            made[key] = sound(tmp_path_factory.mktemp("base"), family, **extra).folder
        return made[key]

    return base
