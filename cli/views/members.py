"""What a table shows of one peer, by its columns."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cli.views.data_set import pages_cell
from peer.figures import NOTHING, number_text, size_text
from peer.plain_text import plain

if TYPE_CHECKING:
    from swarm.status.data_set import DataSetState
    from swarm.status.state import MemberState

_AWAY: Final = "away"
_SOON_S: Final = 600.0  # what a server of a run says that waits for a commit is no forecast
_SERVER: Final = ("peer", "id", "blocks", "rounds", "sessions", "kv", "waiting", "ms", "tokens")
_COMMON: Final = ("up", "down", "up/s", "down/s", "state", "seen", "phase")


def member_cells(member: MemberState, data_set: DataSetState | None = None) -> dict[str, str]:
    claims, facts = member.claims, member.facts
    rounds = facts.merged + facts.missed
    found = {
        "peer": NOTHING,
        "id": member.peer[-6:],
        "in": {"member": "yes", "learner": "new", "none": NOTHING}[facts.membership],
        "stage": NOTHING,
        "round": NOTHING,
        "merged": f"{facts.merged}/{rounds}" if rounds else NOTHING,
    }
    if claims is not None and claims.stage is not None:
        found["stage"] = str(claims.stage)
    if claims is not None and claims.round is not None:
        found["round"] = str(claims.round)
    speed, queue = (claims.speed, claims.queue) if claims is not None else (None, None)
    more = {
        "speed": f"{speed:.1f}" if speed else NOTHING,
        "queue": NOTHING if queue is None else f"{queue:.1f}",
        "loss": number_text(claims.loss if claims is not None else None),
        "pages": pages_cell(data_set, member.peer),
    }
    return found | more | _common_cells(member, claims.state_hash[:8] if claims is not None else "")


def server_cells(member: MemberState) -> dict[str, str]:
    claims = member.claims
    if claims is None or claims.first is None or claims.end is None:
        return dict.fromkeys(_SERVER, NOTHING) | {"id": member.peer[-6:], "phase": _AWAY}
    cells = (
        NOTHING,
        member.peer[-6:],
        f"{claims.first}-{claims.end - 1}",
        ", ".join(map(str, claims.commits)) or NOTHING,
        str(claims.sessions or 0),
        NOTHING if claims.kv_used is None else f"{claims.kv_used:.0%}",
        str(claims.waiting_tokens),
        NOTHING if claims.step_ms is None else f"{claims.step_ms:.1f}",
        str(claims.tokens),
    )
    return dict(zip(_SERVER, cells, strict=True)) | _common_cells(member)


def _common_cells(member: MemberState, state_hash: str = "") -> dict[str, str]:
    """Return the cells that each peer has, from what it claims."""
    claims = member.claims
    if claims is None:
        return {**dict.fromkeys(_COMMON, NOTHING), "phase": _AWAY}
    soon = claims.first is not None and 0 < claims.ready_in_s < _SOON_S
    ready = f", ready in {claims.ready_in_s:.0f} s" if soon else ""
    cells = (
        size_text(claims.bytes_up),
        size_text(claims.bytes_down),
        _rate(claims.up_bytes_s),
        _rate(claims.down_bytes_s),
        state_hash,
        f"{claims.age_s:.0f} s",
        f"{plain(claims.phase, 64)}{ready}{_trouble(member)}",
    )
    return {"peer": plain(claims.name, 16), **dict(zip(_COMMON, cells, strict=True))}


def _trouble(member: MemberState) -> str:
    return {"silent": ", silent", "garbage": ", answers nonsense"}.get(member.seen.events, "")


def _rate(bytes_s: float | None) -> str:
    return NOTHING if bytes_s is None else size_text(bytes_s)
