"""Peers that lie: each runs a node of the real core and bends what it says, with its own key only."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from swarm.protocol.agreement import messages as say
from swarm.protocol.plan import Contribution

if TYPE_CHECKING:
    from tests.simulation.machine import Machine
    from tests.simulation.world import World


class Liar:
    """An honest peer; strategies change one thing each."""

    name = "honest"

    def __init__(self, world: World, machine: Machine, random: Random) -> None:
        self.world, self.machine, self.random = world, machine, random

    def send(self, target: str, message: say.Message) -> None:
        self.world.transmit(self.machine.peer, target, message)

    def hears(self, source: str, message: say.Message) -> bool:
        return True

    def contribution(self, body: Contribution) -> Contribution:
        return body

    def result(self, honest: bytes) -> bytes:
        return honest


def draw(world: World, machine: Machine, random: Random) -> Liar:
    return Liar(world, machine, random)
