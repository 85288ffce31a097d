"""What the executable model of the agreement's design said of availability, before there was code.

Its source is the design's reference `agreement_model.md`, part 2, section 3: a simulation in steps of one round,
without messages, of 3 seeds x 500,000 s a cell, with a spread of 1 point where disks are kept, and up to 5 in `witness`
mode with 2 or 3 members where 20 % are lost. It counts a round that is committed and later taken back.
"""

from __future__ import annotations

from typing import Final, NamedTuple


class Modelled(NamedTuple):
    """One row of the model's table: percent of the time that makes progress, and starts a day."""

    lost: float
    """The share of the members' failures that lose the disk."""
    down: float
    """The share of the time in which the coordinator is away."""
    members: int
    witness: float
    """The operator acts after 2 hours."""
    witness_soon: float | None
    """The operator acts after 10 minutes."""
    required: float
    """The coordinator starts a term 10 s after too few members answer."""
    required_30: float
    """30 s after."""
    starts: float
    """Starts a day behind `required`."""
    undoing: float
    """Those of them that take rounds back."""


MODEL: Final = (
    Modelled(0.0, 0.1, 2, 90.9, 91.0, 81.5, 78.3, 170.6, 8.18),
    Modelled(0.0, 0.1, 3, 96.3, 96.4, 87.0, 85.4, 86.5, 2.94),
    Modelled(0.0, 0.1, 4, 98.6, 98.6, 88.6, 87.8, 43.3, 0.58),
    Modelled(0.0, 0.1, 5, 99.6, None, 89.6, 89.2, 22.3, 0.06),
    Modelled(0.0, 0.1, 8, 100.0, None, 90.4, 90.4, 2.6, 0.00),
    Modelled(0.0, 0.01, 2, 94.6, 94.6, 91.4, 88.0, 181.6, 9.96),
    Modelled(0.0, 0.01, 3, 97.2, 97.2, 95.5, 93.8, 97.7, 4.03),
    Modelled(0.0, 0.01, 4, 99.0, 99.0, 97.4, 96.5, 50.1, 1.04),
    Modelled(0.0, 0.01, 5, 99.6, None, 98.4, 97.9, 23.3, 0.12),
    Modelled(0.0, 0.01, 8, 100.0, None, 99.1, 99.0, 1.8, 0.00),
    Modelled(0.0, 0.001, 2, 94.5, 94.5, 91.9, 88.5, 184.1, 9.91),
    Modelled(0.0, 0.001, 3, 97.8, 97.8, 96.6, 94.9, 95.6, 3.51),
    Modelled(0.0, 0.001, 4, 99.0, 99.0, 98.5, 97.6, 46.6, 1.15),
    Modelled(0.0, 0.001, 5, 99.5, None, 99.2, 98.8, 24.1, 0.23),
    Modelled(0.0, 0.001, 8, 100.0, None, 99.8, 99.7, 2.2, 0.00),
    Modelled(0.2, 0.1, 2, 43.3, 84.2, 70.5, 66.7, 159.3, 13.31),
    Modelled(0.2, 0.1, 3, 70.5, 94.1, 82.9, 80.9, 87.0, 4.03),
    Modelled(0.2, 0.1, 4, 89.3, 97.7, 86.9, 86.1, 45.9, 1.04),
    Modelled(0.2, 0.1, 5, 95.2, None, 86.5, 86.1, 23.5, 0.35),
    Modelled(0.2, 0.1, 8, 100.0, None, 90.3, 90.3, 3.6, 0.00),
    Modelled(0.2, 0.01, 2, 56.6, 90.4, 90.5, 86.8, 189.3, 15.38),
    Modelled(0.2, 0.01, 3, 77.8, 95.5, 94.0, 92.1, 99.9, 5.59),
    Modelled(0.2, 0.01, 4, 91.8, 98.3, 96.9, 95.9, 51.8, 1.27),
    Modelled(0.2, 0.01, 5, 96.1, None, 98.3, 97.9, 25.0, 0.23),
    Modelled(0.2, 0.01, 8, 100.0, None, 99.1, 99.0, 1.9, 0.00),
    Modelled(0.2, 0.001, 2, 57.7, 90.4, 91.4, 87.8, 192.2, 15.38),
    Modelled(0.2, 0.001, 3, 82.3, 96.2, 96.5, 94.6, 99.4, 4.55),
    Modelled(0.2, 0.001, 4, 94.2, 98.5, 98.0, 97.1, 48.6, 1.38),
    Modelled(0.2, 0.001, 5, 97.9, None, 99.2, 98.7, 25.4, 0.29),
    Modelled(0.2, 0.001, 8, 100.0, None, 99.8, 99.7, 2.5, 0.00),
)
