"""A peer's time in a run: it opens a replica of a stage, trains, moves to another stage where it is worth more, and
stays at the end until the other peers have the last commit.
"""

from __future__ import annotations

import sys

import trio

from peer import faults
from peer.errors import ConfigError, Diverged
from swarm.membership.completion import check_run_alive, run_is_over, wait_for_others
from swarm.membership.divergence import DIVERGED, check_stages_converge, tell_diverged
from swarm.membership.living import note_living
from swarm.pipeline.data_feed import FeederStats, serve_tokens
from swarm.run.peer_context import PeerContext
from swarm.training.build_trainer import settings_of
from swarm.training.corpus import open_corpus
from swarm.training.replica import open_replica
from swarm.training.stage_selection import StageSelection

if sys.version_info < (3, 11):
    from exceptiongroup import BaseExceptionGroup


class PeerLifecycle:
    """Takes part in a run until it is complete."""

    def __init__(self, context: PeerContext) -> None:
        self._context, self._manifest = context, context.manifest
        self._selection = StageSelection(context)
        self._membership = self._selection.membership

    async def run(self) -> None:
        """Raises ConfigError, ResourceError, WorkerError, CheckpointError where no replica can be opened; NoQuorum
        where the run is complete and no peer is left that could pass on its last round; Diverged."""
        authority, rounds, stages = self._manifest.authority, self._manifest.run.rounds, self._manifest.stages
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._membership.run)
            nursery.start_soon(note_living, self._context.host, self._context.home, self._membership.others)
            if stages > 1:
                nursery.start_soon(
                    check_stages_converge, self._membership.others, stages, lambda: self._selection.stage
                )
            if self._context.config.role == "feeder":
                await self._feed()
            else:
                others, selection = self._membership.others, self._selection
                nursery.start_soon(check_run_alive, others, authority, rounds, lambda: selection.is_behind)
                await self._rest()
                await selection.choose()
                while await self._stay(selection.stage):
                    await self._rest()
            nursery.cancel_scope.cancel()

    async def _rest(self) -> None:
        """In a pipeline, have no replica while this machine's owner has paused the peer: as a peer without a stage it
        gets no micro-batches, and another one may take over. Afterwards it goes back to its stage."""
        pause, selection = self._context.pause, self._selection
        selection.resting |= self._manifest.stages > 1 and pause.paused
        if selection.resting:
            await self._membership.announce()
            await pause.until(paused=False)
            selection.wake()

    async def _stay(self, stage: int) -> bool:
        """Serve `stage` as `_serve` does. A peer that moved to the first stage and has too little text goes back; one
        whose training has diverged informs the other stages."""
        try:
            return await self._serve(stage)
        except BaseExceptionGroup as group:
            if group.subgroup(Diverged) is not None and self._manifest.stages > 1:
                self._selection.phase = DIVERGED
                await tell_diverged(self._membership)
            raise
        except ConfigError as error:
            if not self._selection.may_return_without_text():
                raise
            self._selection.return_without_text(str(error))
            return True

    async def _serve(self, stage: int) -> bool:
        """Open a replica of `stage` and run it. Returns false when the run is complete; true when another replica is to
        be opened, because another stage needs this peer more or this one has lost its last replica before this peer had
        its state."""
        moves, selection = False, self._selection
        selection.opening()
        async with open_replica(self._context, stage, self._membership.others) as replica:
            selection.opened(replica)
            try:
                async with trio.open_nursery() as nursery:

                    async def watch() -> None:
                        nonlocal moves
                        await selection.until_needed_elsewhere()
                        faults.reach("leaving")
                        moves = True
                        async with trio.open_nursery() as leaving:
                            leaving.start_soon(selection.cancel_once_urgent, leaving.cancel_scope)
                            await replica.drain()
                            leaving.cancel_scope.cancel()
                        replica.tell_unmerged()
                        nursery.cancel_scope.cancel()

                    async def yield_device() -> None:
                        nonlocal moves
                        await self._context.pause.until(paused=True)
                        moves = selection.resting = True
                        nursery.start_soon(self._membership.announce)  # others send no more micro-batches
                        await replica.yield_device()
                        replica.tell_unmerged()
                        nursery.cancel_scope.cancel()

                    if self._manifest.stages > 1:
                        nursery.start_soon(watch)
                        nursery.start_soon(yield_device)
                    await replica.run(self._wait_for_others)
                    moves = False
                    nursery.cancel_scope.cancel()
            finally:
                selection.closed(replica)
        return moves

    async def _wait_for_others(self) -> None:
        await wait_for_others(self._membership, self._manifest.run.rounds, self._manifest.authority)

    async def _feed(self) -> None:
        """Read text for the first stage until all stages have reached the run's end."""
        corpus = await open_corpus(self._context)
        settings = settings_of(self._manifest)
        stats = FeederStats(settings, self._context.host.events)
        serve_tokens(self._context.host.rpc, settings, corpus.read_ahead, stats.note)
        self._selection.phase = "feeding"
        try:
            await run_is_over(self._membership, self._manifest.run.rounds, trains=False)
        finally:
            stats.tell()
