"""How the traffic of the agreement is shown, on a terminal and in the results."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from benchmarks.common.markdown import table

HEAD: Final = (
    "members",
    "messages a member",
    "KB a member",
    "limit, KB a member",
    "MB in all",
    "busiest, MB",
    "signed a node",
    "checked a node",
    "records a node",
)


def rows(groups: Sequence[dict[str, Any]]) -> list[list[str]]:
    """Return the table's lines."""
    return [
        [
            f"{g['members']}",
            f"{g['messages'] / g['members']:.0f}",
            f"{g['bytes'] / g['members'] / 1e3:.1f}",
            f"{g['limit_bytes'] / g['members'] / 1e3:.1f}",
            f"{g['bytes'] / 1e6:.2f}",
            f"{g['busiest_bytes'] / 1e6:.2f}",
            f"{g['signed_a_node']:.0f}",
            f"{g['checked_a_node']:.0f}",
            f"{g['records_a_node']:.1f}",
        ]
        for g in groups
    ]


def kinds(group: dict[str, Any]) -> str:
    """Return which kinds of messages a group's bytes are, in words."""
    shares = [(kind, 100 * size / group["bytes"]) for kind, size in group["kinds"].items()]
    return ", ".join(f"{kind} {share:.0f} %" for kind, share in shares if share >= 0.5)


def section(groups: Sequence[dict[str, Any]]) -> str:
    """What the agreement sends, signs and writes in a round."""
    by_members = {group["members"]: group["bytes"] / group["members"] for group in groups}
    times = f" A member's bytes at 64 are {by_members[64] / by_members[16]:.2f} times those at 16 (bar 2)."
    of_kinds = "\n".join(f"- {group['members']} members: {kinds(group)}." for group in groups)
    return (
        "A round of 20 s with 4 slices, in virtual time, without faults; bytes without the headers of calls and without"
        " slices. The limit is each member's receiving each other one's contribution once."
        + (times if {16, 64} <= set(by_members) else "")
        + f"\n\n{table(HEAD, rows(groups))}\n\nOf which messages the bytes are:\n\n{of_kinds}"
    )
