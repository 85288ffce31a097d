"""The reference that the kernels are held against: the torch code alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from optim.kernels import codec_kernels


@contextmanager
def torch_only() -> Iterator[None]:
    """Do without kernels, as on a machine that has none."""
    with patch.object(codec_kernels, "KERNELS", {}):
        yield
