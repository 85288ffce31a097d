"""The end of a pipeline that has diverged.

Only a stage whose own steps are skipped sees that. Its peers say so, as their phase, before they leave. No peer
believes that alone, of a fault that may be another machine's: first the others try that stage themselves. A peer that
must stay where it is ends once no peer has taken the stage for a while.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import trio

from peer.catalogue.happening import LOWER_RATE
from peer.errors import Diverged
from swarm.membership.completion import LOOK_EVERY_S
from swarm.membership.member_record import MemberRecord, MemberView
from swarm.membership.membership import REFRESH_S, Membership

DIVERGED: Final = "diverged"
TELL_S: Final = REFRESH_S + 1.0  # in which others read the phase
UNSERVED_S: Final = 30.0  # longer than a peer takes to move to a stage


async def tell_diverged(membership: Membership[MemberRecord]) -> None:
    """Publish this peer's record, whose phase is `DIVERGED`, until others have read it."""
    await membership.announce()
    await trio.sleep(TELL_S)


async def check_stages_converge(view: MemberView, stages: int, own: Callable[[], int]) -> None:
    """Run until cancelled. Raises Diverged where the last peers of a stage other than `own()` have said that they end
    as training has diverged, and no peer has taken that stage for `UNSERVED_S`."""
    since: dict[int, float] = {}
    while True:
        await trio.sleep(LOOK_EVERY_S)
        now, records = trio.current_time(), view().values()
        for stage in range(stages):
            phases = [record.phase for record in records if record.role == "stage" and record.stage == stage]
            if stage == own() or any(phase != DIVERGED for phase in phases):
                since.pop(stage, None)
            elif phases:
                since.setdefault(stage, now)
            if stage in since and now - since[stage] >= UNSERVED_S:
                raise Diverged(
                    f"training has diverged: the last peer of stage {stage} could use no step any more, and no other"
                    f" peer has taken that stage since: {LOWER_RATE}"
                )
