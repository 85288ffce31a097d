"""The loop of a gossip run (NoLoCo, arXiv 2506.10911): train, exchange updates with one other peer, step.

There are no common rounds, leaders or votes. A peer without a partner steps with its own delta; a peer too far behind
the others takes over the weights of one of them.
"""

from __future__ import annotations

from collections import deque
from random import Random
from statistics import median
from typing import Final

import trio
from blake3 import blake3

from peer.bounds import finite_loss
from peer.catalogue.machine import WorkerFailed
from peer.catalogue.rounds import CatchUpFailed, GossipAlone, GossipMet, PhaseEntered
from peer.errors import NetworkError, ProtocolViolation, WorkerError
from peer.net.rpc import Call
from swarm.gossip.coding import PairCoding, step_alone
from swarm.gossip.context import GossipContext, GossipRules
from swarm.gossip.exchange import PairExchange
from swarm.gossip.matchmaking import Matchmaker
from swarm.gossip.norm_check import NormCheck
from swarm.gossip.outgoing import OutgoingUpdate
from swarm.gossip.pairing import PeerView, candidates, is_left_behind, round_after, round_after_alone, steps_for
from swarm.gossip.replica import Replica
from swarm.gossip.state_transfer import GossipStateServer
from swarm.protocol.head import Head
from swarm.protocol.ledger import Range
from swarm.protocol.messages import HEAD_REPORT, AskHead, HeadReport
from swarm.rounds.trainers.trainer import TrainResult

TIMEOUT_MIN_S: Final = 3.0
RETRY_S: Final = 1.0
LOOK_S: Final = 0.25
HISTORY: Final = 8
SLOTS: Final = 256  # of a segment of sample numbers


class GossipEngine:
    """Runs rounds until this peer's round is the run's last."""

    def __init__(self, context: GossipContext, rules: GossipRules, replica: Replica, coding: PairCoding) -> None:
        self.phase = "joining"
        self.replica = replica
        self._context, self._rules, self._coding = context, rules, coding
        self._state_server = GossipStateServer(context, rules, replica)
        self._norm_check = NormCheck(coding, rules.steps)
        self._compute_s: deque[float] = deque(maxlen=HISTORY)
        self._random = Random()
        self._heard: dict[str, int] = {}
        context.host.rpc.register(HEAD_REPORT, self._on_head_report)

    @property
    def head(self) -> Head:
        """The head that this peer publishes."""
        return self.replica.head(self._rules.run_id, self._rules.steps)

    async def run(self) -> None:
        context = self._context
        async with trio.open_nursery() as tasks:
            match = Matchmaker(context.host, context.timeouts, context.host.events, tasks, self._heard)
            await self._gather()
            while not self._rules.rounds or self.replica.round < self._rules.rounds:
                await self._context.listener.working()
                if self._must_fetch():
                    await self._catch_up()
                else:
                    await self._round(match)
            self.phase, match.finished = "finished", True
            await match.serve_partner()
            tasks.cancel_scope.cancel()

    def others(self) -> dict[str, PeerView]:
        """Return the other live members, with the newest that is known of each."""
        seen = dict(self._context.listener.others())
        for peer in self._heard.keys() - seen.keys():
            del self._heard[peer]
        for peer, round_number in self._heard.items():
            if round_number > seen[peer].round:
                seen[peer] = PeerView(round_number, seen[peer].speed)
        for peer in self._context.listener.banned():
            seen.pop(peer, None)
        return seen

    async def _gather(self) -> None:
        """Wait for the run's first peers, unless it is under way. A proposal says so before the records do, which are
        read every few seconds: rounds may be shorter."""
        self.phase = "waiting for peers"
        while self.replica.round <= 0 and not self._heard:
            others = self.others()
            if len(others) + 1 >= self._rules.min_peers or any(seen.round > 0 for seen in others.values()):
                return
            await trio.sleep(LOOK_S)

    # -- one round -----------------------------------------------------------------------------------------------------

    async def _round(self, match: Matchmaker) -> None:
        began = trio.current_time()
        outgoing = OutgoingUpdate(self._coding, self.replica.theta)
        match.open(outgoing, self.replica.round, began + (median(self._compute_s) if self._compute_s else 0.0))
        exchange: PairExchange | None = None
        try:
            work = await self._train_and_publish()
            if work is not None and await self._add_delta(outgoing, work):
                trained = trio.current_time()
                self._compute_s.append(trained - began)
                self.phase = "exchanging"
                self._context.host.events.emit(PhaseEntered(round=self.replica.round + 1, phase="exchange"))
                self._norm_check.begin(outgoing, work.steps)
                exchange = await match.meet(self._partners, self._wait_s(), self._norm_check)
            else:
                work = None
        finally:
            match.close()
            with trio.CancelScope(shield=True):
                await outgoing.close()
        if work is None:
            await trio.sleep(RETRY_S)
            return
        waited_s = trio.current_time() - trained
        await self._step(outgoing, work, exchange)
        self._report(work, exchange, trio.current_time() - began, waited_s)
        await self._context.listener.stepped(self.head)

    async def _train_and_publish(self) -> TrainResult | None:
        self.phase = "training"
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._state_server.publish)  # the outer weights do not change while the worker trains
            work = await self._train()
        return work

    async def _train(self) -> TrainResult | None:
        context, rules, replica = self._context, self._rules, self.replica
        speed = context.trainer.speed
        steps = steps_for(speed, self.others(), rules.steps)
        ((first, _),) = draw(rules.run_id, context.me.peer, replica.draws, rules.steps * rules.batch_size)
        replica.draws += 1  # even if the work fails, these samples are not drawn again
        samples = ((first, first + steps * rules.batch_size),)
        deadline_s = min(rules.compute_s_max, 2 * steps / speed + 5.0) if speed > 0 else rules.compute_s_max
        first_step = replica.round * rules.steps
        context.host.events.emit(PhaseEntered(round=replica.round + 1, phase="compute", step=first_step, steps=steps))
        try:
            work = await context.trainer.train(samples, first_step, steps, deadline_s)
        except WorkerError as error:
            context.host.events.emit(WorkerFailed(round=replica.round, reason=str(error)))
            return None
        return work if work.steps else None

    async def _add_delta(self, outgoing: OutgoingUpdate, work: TrainResult) -> bool:
        """Add the work to the outgoing update; return whether it can be exchanged."""
        try:
            self._norm_check.norms.own.append(await outgoing.add_delta(work.product))
        except ProtocolViolation as error:
            self._context.host.events.emit("update_unusable", round=self.replica.round, reason=str(error))
            return False
        return True

    def _partners(self) -> list[str]:
        return candidates(self.others(), self.replica.round, (), self._random)

    def _wait_s(self) -> float:
        """As long as this peer's own work takes: a peer as fast as this one is ready by then."""
        return max(TIMEOUT_MIN_S, self._rules.timeout_floor_s, median(self._compute_s))

    async def _step(self, outgoing: OutgoingUpdate, work: TrainResult, exchange: PairExchange | None) -> None:
        replica, constants, others = self.replica, self._rules.constants, self.others()
        with trio.CancelScope(shield=True):  # a save at the end finds the old state or the new one
            if exchange is None or exchange.theirs is None:
                await outgoing.restore_residual()
                await trio.to_thread.run_sync(step_alone, replica.theta, replica.move, work.product, constants)
                replica.round = round_after_alone(replica.round, others)
            else:
                mine, theirs = await outgoing.message(), exchange.theirs
                await trio.to_thread.run_sync(self._coding.step, replica.theta, replica.move, mine, theirs, constants)
                exchange.theirs = None  # this peer's update can still be fetched
                replica.round = round_after(replica.round, replica.round + exchange.terms.rounds_apart, others)
            replica.tokens += work.samples * self._rules.seq_len
            await trio.to_thread.run_sync(replica.rehash)
        self._context.trainer.adopt(replica.theta)

    def _report(self, work: TrainResult, exchange: PairExchange | None, seconds: float, waited_s: float) -> None:
        compared = self._norm_check.compared if exchange is not None else None
        host = self._context.host
        told = (GossipAlone if exchange is None else GossipMet)(
            round=self.replica.round,
            partner="" if exchange is None else exchange.terms.partner,
            rounds_apart=0 if exchange is None else exchange.terms.rounds_apart,
            distance=None if compared is None else compared.relative_distance,
            payload_bytes=0 if exchange is None else exchange.bytes_down,
            members=len(self.others()) + 1,
            state_hash=self.replica.tree.root.hex(),
            steps=work.steps,
            skipped=work.skipped,
            overflows=work.overflows,
            tokens=self.replica.tokens,
            loss=finite_loss(work.loss),
            bytes_up=host.bytes_up,
            bytes_down=host.bytes_down,
            seconds=round(seconds, 3),
            waited_s=round(waited_s, 3),
        )
        host.events.emit(told)

    # -- joining late, straying ----------------------------------------------------------------------------------------

    def _must_fetch(self) -> bool:
        mine = self.replica.round
        return mine < 0 or self._norm_check.strayed or is_left_behind(mine, self.others())

    async def _catch_up(self) -> None:
        self.phase = "catching up"
        try:
            await self._state_server.fetch(self.others())
        except (NetworkError, ProtocolViolation) as error:
            self._context.host.events.emit(CatchUpFailed(round=self.replica.round, reason=str(error)))
            await trio.sleep(RETRY_S)
            return
        self._context.trainer.adopt(self.replica.theta)
        self._norm_check = NormCheck(self._coding, self._rules.steps)
        await self._context.listener.stepped(self.head)

    async def _on_head_report(self, call: Call[AskHead]) -> HeadReport:
        """Answer clients (`peer status`). There is no agreement, so nothing is proved."""
        return HeadReport(self.head, self._context.me, self.phase)


def draw(run_id: str, peer: str, number: int, count: int) -> tuple[Range, ...]:
    """Return the `count` samples of that peer's draw `number` (from 0); `count` is the same for all draws of a run.

    The sequence of sample numbers (`peer.data.corpus`) is cut into segments of `SLOTS` slots. In its n-th draw a peer
    takes, of segment n, the slot that a hash of (run, peer, n) picks. So peers need no coordination: a peer never takes
    a number twice, and two peers share one only in the same draw, with probability 1 / SLOTS."""
    digest = blake3(f"{run_id}/{peer}/{number}".encode(), derive_key_context="barnraise/1/gossip-samples").digest(8)
    slot = int.from_bytes(digest, "big") % SLOTS
    first = (number * SLOTS + slot) * count
    return ((first, first + count),)
