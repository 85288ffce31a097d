"""Computing under a plan that was replaced, or that the present leader does not have."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import trio

from peer.errors import RoundDiscarded
from peer.events import EventLog
from peer.identity import Identity, sign_body
from swarm.protocol.head import Member, genesis
from swarm.protocol.plan import CONTRIBUTION_KIND, Contribution
from swarm.rounds import compute as compute_phase
from swarm.rounds.compute import ComputePhase
from swarm.rounds.round_state import RoundState

ME = Member("me", "s")
HEAD = genesis("run", b"s0" * 16).regrouped((ME,), 1)


class Contributor:
    """Encodes until `encoded`, even if cancelled."""

    def __init__(self) -> None:
        self.begun, self.encoded = trio.Event(), trio.Event()
        self.restored: list[object] = []

    async def contribute(self, *_: object) -> tuple[str, str]:
        with trio.CancelScope(shield=True):
            self.begun.set()
            await self.encoded.wait()
        return "contribution", "update"

    def restore_residual(self, update: object) -> None:
        self.restored.append(update)


async def test_an_update_of_a_replaced_plan_is_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compute_phase, "check_plan", lambda *_: None)
    round_state, contributor = RoundState(HEAD, ME), Contributor()
    schedule = SimpleNamespace(synchronous=False, pipeline=False)
    context: Any = SimpleNamespace(me=ME, events=EventLog(), schedule=schedule, timeouts=SimpleNamespace(answer_s=1.0))
    no_time = lambda *_: 0.0  # noqa: E731
    election_timeout: Any = SimpleNamespace(allow_work=no_time, time_for=no_time, time_after_work=no_time)
    mine: Any = SimpleNamespace(hash=b"mine", assignments=(), of=lambda _: ME)
    next_one: Any = SimpleNamespace(hash=b"next", assignments=(), of=lambda _: None)
    signed: Any = None
    with trio.fail_after(60):
        async with trio.open_nursery() as nursery:
            round_info: Any = SimpleNamespace(round=1)
            work = ComputePhase(
                context, round_state, round_info, signed, contributor, election_timeout, nursery.start_soon
            )  # type: ignore[arg-type]
            work.begin(mine, signed, "leader", False)
            await contributor.begun.wait()
            work.begin(next_one, signed, "leader", False)
            contributor.encoded.set()
    assert round_state.plan is next_one
    assert round_state.update is None and round_state.contribution is None
    assert contributor.restored == ["update"]


async def test_a_contribution_to_an_unknown_plan_is_no_violation() -> None:
    """The previous leader died while it sent its plan. A member that has it may finish before the next leader has read
    the promises; a `ProtocolViolation` would penalize it."""
    identity, nothing = Identity.generate(), cast(Any, None)
    round_state, member = RoundState(HEAD, ME), Member(identity.peer_id, "s")
    body = Contribution(HEAD.hash, b"theirs", member, 1, 2, 0.0, (), ())
    work = ComputePhase(nothing, round_state, nothing, nothing, nothing, nothing, nothing)
    with pytest.raises(RoundDiscarded, match="before its plan"):
        work.take_submission(sign_body(identity, CONTRIBUTION_KIND, body))
    assert not round_state.submitted
