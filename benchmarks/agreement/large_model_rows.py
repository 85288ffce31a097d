"""How the commitments of large models are shown, on a terminal and in the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.common.markdown import table

HEAD: Final = (
    "parameters",
    "method",
    "slices",
    "bundles",
    "contribution, KB",
    "roster, KB",
    "proposal, KB",
    "link, KB",
    "members merged",
    "fit without bundles",
)


def section(figures: Sequence[dict[str, Any]]) -> str:
    """What a round of a large model is committed to with."""
    rows = [
        [
            f"{f['parameters'] / 1e9:.2f} B",
            f["method"],
            f"{f['slices']}",
            f"{f['bundles']}",
            f"{f['contribution_bytes'] / 1e3:.1f}",
            f"{f['roster_bytes'] / 1e3:.0f}",
            f"{max(f['proposal_bytes'], f['short_proposal_bytes']) / 1e3:.0f}",
            f"{f['chain_bytes'] / 1e3:.0f}",
            f"{f['merged']} of {f['members']}",
            f"{f['unbundled']}",
        ]
        for f in figures
    ]
    return (
        "The largest message of each kind, as sent, among nodes of the core in virtual time. Slices are sent one by"
        f" one; committed to are bundles of them.\n\n{table(HEAD, rows)}"
    )
