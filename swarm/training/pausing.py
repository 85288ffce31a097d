"""A replica under its owner's pause: it gives the device back, and goes on as one that votes late and does no work."""

from __future__ import annotations

import trio

from swarm.rounds.replica_driver import ReplicaDriver
from swarm.rounds.trainers.worker_trainer import WorkerTrainer
from swarm.run.owners_pause import OwnersPause


async def obey(pause: OwnersPause, driver: ReplicaDriver, trainer: WorkerTrainer) -> None:
    """Pause and resume a replica as its owner wants, until cancelled. Others count on its work again once its worker
    is there; a pause meanwhile ends the start."""
    while True:
        await pause.until(paused=True)
        driver.pause(True)
        await trainer.pause()
        await pause.until(paused=False)
        async with trio.open_nursery() as nursery:

            async def stop() -> None:
                await pause.until(paused=True)
                nursery.cancel_scope.cancel()

            nursery.start_soon(stop)
            await trainer.resume()
            driver.pause(False)
            nursery.cancel_scope.cancel()
