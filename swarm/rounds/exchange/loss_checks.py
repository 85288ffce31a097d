"""Contributions judged by what they do to the held-out loss (`swarm.protocol.loss_check`), a round after their merge.

At a commit a member may draw another contributor. While it trains the next round it fetches that update from the owners
of the slices, as an audit does. Before the inner steps of a later round its worker measures the losses. So no round
waits for a check, but for the time of the measurement at one member. Each member judges alone and takes no word for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import msgspec
import torch
import trio
from blake3 import blake3

from peer.bounds import finite_loss
from peer.catalogue.rounds import ContributionJudged
from peer.errors import ProtocolViolation, WorkerError
from peer.identity import sign_body
from peer.net.method import Call, Empty
from swarm.protocol.agreement import events
from swarm.protocol.head import Head
from swarm.protocol.loss_check import CONTRIBUTORS_MIN, Judgements, LossCheck, ways
from swarm.protocol.messages import JUDGED, JUDGED_MAX, JudgedPeers, SliceOf
from swarm.protocol.plan import Contribution
from swarm.rounds.context import RoundContext
from swarm.rounds.exchange.audits import Audits
from swarm.rounds.exchange.merge_order import MergeOrder
from swarm.rounds.exchange.slice_exchange import SliceExchange
from swarm.rounds.trainers.trainer import MeasuresLosses, Point

_DRAW_KIND: Final = "loss check"


@dataclass(frozen=True)
class _Drawn:
    """One check to be made."""

    exchange: SliceExchange
    own: Contribution
    other: Contribution
    before: torch.Tensor
    """The weights before the round, (P,)."""


class LossChecks:
    """The checks by loss of one replica, one at a time. `share`: of the commits, drawn at random; those with a suspect
    besides."""

    def __init__(
        self, context: RoundContext, audits: Audits, share: float, feed: Callable[[events.Event], None]
    ) -> None:
        self._context, self._audits, self._share, self._feed = context, audits, share, feed
        self._judgements = Judgements()
        self._busy = False
        context.host.rpc.register(JUDGED, self._on_ask)

    async def draw(self, exchange: SliceExchange, head: Head) -> _Drawn | None:
        """Draw whether to check a contribution to `head`, and which. Call it before the weights are those of `head`:
        the ones before are copied."""
        order, me = exchange.order, self._context.me
        own = next((body for body in order.merged if body.member == me), None)
        others = [body for body in order.merged if body.member != me and body.norm > 0]
        measures = self._share > 0 and isinstance(self._context.trainer, MeasuresLosses)
        if self._busy or not measures or own is None or own.norm == 0 or len(order.merged) < CONTRIBUTORS_MIN:
            return None
        signed = sign_body(self._context.identity, _DRAW_KIND, SliceOf(head.hash, 0))  # no other peer can foresee it
        dice = blake3(msgspec.msgpack.encode(signed)).digest()
        suspects = [body for body in others if body.member.peer in self._judgements.suspects]
        if not others or (not suspects and int.from_bytes(dice[:8], "big") >= self._share * 2**64):
            return None
        drawn = suspects or others
        other = drawn[int.from_bytes(dice[8:16], "big") % len(drawn)]
        self._busy = True
        before = await trio.to_thread.run_sync(self._context.state.theta.clone)
        return _Drawn(exchange, own, other, before)

    async def check(self, drawn: _Drawn) -> None:
        """Fetch the update, measure, and report to the node which peer to exclude. An update that cannot be had, or a
        worker that fails, is no outcome."""
        try:
            mine = [drawn.exchange.input_of(index, drawn.own) for index in drawn.exchange.order.indices]
            theirs = await self._audits.update_of(drawn.exchange, drawn.other)
            if theirs is None or any(data is None for data in mine):
                return
            own, other = ways(drawn.own.norm, drawn.other.norm)
            moved = [data for data in mine if data is not None]
            order, trainer = drawn.exchange.order, self._context.trainer
            assert isinstance(trainer, MeasuresLosses)
            points: list[Point] = [
                lambda out: move(out, drawn.before, order, (), 0.0),
                lambda out: move(out, drawn.before, order, moved, own),
                lambda out: move(out, drawn.before, order, theirs, other),
            ]
            start, along_own, along_other = await trainer.losses_of(points)
            self._conclude(drawn, LossCheck(start, along_own, along_other, drawn.other.steps / drawn.own.steps))
        except (WorkerError, ProtocolViolation) as error:
            self._context.events.emit(
                "loss_check_failed", round=drawn.exchange.order.round_info.round, reason=str(error)
            )
        finally:
            self._busy = False

    async def _on_ask(self, call: Call[Empty]) -> JudgedPeers:
        left_out = self._judgements.left_out
        suspects = self._judgements.suspects - left_out
        return JudgedPeers(tuple(sorted(suspects))[:JUDGED_MAX], tuple(sorted(left_out))[:JUDGED_MAX])

    def _conclude(self, drawn: _Drawn, check: LossCheck) -> None:
        peer, is_harmful = drawn.other.member.peer, check.is_harmful
        if is_harmful is not None:
            self._judgements.note(peer, is_harmful)
            self._feed(events.Judged(tuple(sorted(self._judgements.left_out))))
        number, left_out = drawn.exchange.order.round_info.round, peer in self._judgements.left_out
        gains = {"gain": finite_loss(check.gain), "own_gain": finite_loss(check.own_gain)}
        self._context.events.emit("contribution_checked", round=number, peer=peer, is_harmful=is_harmful, **gains)
        if is_harmful:
            self._context.events.emit(ContributionJudged(round=number, peer=peer, left_out=left_out, **gains))


def move(out: torch.Tensor, before: torch.Tensor, order: MergeOrder, slices: Sequence[memoryview], way: float) -> None:
    """Write `before` - `way` * update to `out`, all (P,). Blocks. Raises `ProtocolViolation` if a slice does not
    decode."""
    out.copy_(before)
    for index, data in enumerate(slices):
        alone = order.coding.merge(index, [data], [1.0])  # in the form of a result, which alone can be decoded
        for place, values in order.coding.updates(index, alone):
            out[place].sub_(values, alpha=way)
