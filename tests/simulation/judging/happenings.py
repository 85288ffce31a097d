"""What each fault of the simulator must do to a world, beside what happens without it."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any, Final

from swarm.protocol.agreement import events
from swarm.protocol.agreement import messages as msg
from tests.simulation.faults import Fault
from tests.simulation.judging.stage import Stage, StandIn
from tests.simulation.net import Network
from tests.simulation.tensors import GENESIS
from tests.simulation.world import World

Happening = Callable[[], None]
HAPPENINGS: Final[dict[str, Happening]] = {}
MESSAGES: Final = 400
ASK: Final = msg.AskChainMessage(())


def happens(play: Happening) -> Happening:
    """Add what one fault must do. It raises AssertionError if that does not happen."""
    HAPPENINGS[play.__name__] = play
    return play


def placed(peers: str = "WABC", **setup: Any) -> World:
    """Return a world without faults, whose machines are up and do nothing by themselves."""
    stage = Stage(**setup)
    stage.stand(peers, GENESIS)
    return stage.world


def fault(world: World, kind: str, *args: Any) -> None:
    world._fault(Fault(world.now, kind, args))


def node(world: World, peer: str) -> StandIn:
    found = world.machines[peer].node
    assert isinstance(found, StandIn)
    return found


def pass_s(world: World, seconds: float) -> None:
    """Let time pass, also where nothing happens."""
    world.at(world.now + seconds, None, lambda: None)
    world.advance(world.now + seconds)


def heard(world: World, source: str, target: str, seconds: float = 0.5) -> int:
    """Return how many copies of a message from one peer to another arrive within so many seconds."""
    seen = len(node(world, target).events)
    world.transmit(source, target, ASK)
    pass_s(world, seconds)
    return sum(isinstance(event, events.Received) for event in node(world, target).events[seen:])


# -- the network -------------------------------------------------------------------------------------------------------


@happens
def cut() -> None:
    world = placed()
    fault(world, "cut", ("A",), False, 5.0)
    assert [heard(world, *way) for way in ("AB", "BA", "AW", "CA", "BC", "WB")] == [0, 0, 0, 0, 1, 1]
    pass_s(world, 0.5)
    assert events.PeerDown("A") in node(world, "B").events and events.PeerDown("B") in node(world, "A").events
    pass_s(world, 1.6)
    assert [heard(world, *way) for way in ("AB", "BA")] == [1, 1]
    assert events.PeerUp("A") in node(world, "B").events


@happens
def one_way_cut() -> None:
    world = placed()
    fault(world, "cut", ("A",), True, 5.0)
    assert [heard(world, *way) for way in ("AB", "AW", "BA", "WA", "BC")] == [0, 0, 1, 1, 1]


@happens
def two_cuts_at_once() -> None:
    """The shorter one does not end the longer one."""
    world = placed()
    fault(world, "cut", ("A",), False, 5.0)
    fault(world, "cut", ("A", "B"), False, 1.0)
    pass_s(world, 2.0)
    assert [heard(world, *way) for way in ("AB", "AC", "BC")] == [0, 0, 1]


@happens
def cuts_end_with_the_faults() -> None:
    world = placed()
    world.now = world.heals_at - 1.0
    fault(world, "cut", ("A",), False, 20.0)
    world._heal()
    assert heard(world, "A", "B") == 1


def copies(network: Network, now: float = 0.0, tag: str = "vote") -> list[tuple[float, ...]]:
    return [network.delays("A", "B", tag, now) for _ in range(MESSAGES)]


def noisy(kind: str, *args: Any) -> World:
    world = placed()
    assert {len(one) for one in copies(world.network)} == {1} and max(copies(world.network))[0] < 0.5
    fault(world, kind, *args)
    return world


@happens
def drop() -> None:
    network = noisy("drop", 0.3).network
    assert 0.2 < sum(not one for one in copies(network)) / MESSAGES < 0.4
    assert all(copies(network, now=network.heals_at))


@happens
def duplicate() -> None:
    world = noisy("duplicate", 0.2)
    assert 0.1 < sum(len(one) == 2 for one in copies(world.network)) / MESSAGES < 0.3
    fault(world, "duplicate", 1.0)
    assert heard(world, "A", "B", seconds=11.0) == 2


@happens
def tails() -> None:
    network = noisy("tails", 0.1).network
    delays = [delay for (delay,) in copies(network)]
    assert 0.05 < sum(delay > 0.5 for delay in delays) / MESSAGES < 0.2 and max(delays) <= 20.0


@happens
def slow_types() -> None:
    network = noisy("slow_types", "vote", "chain").network
    slow, usual = copies(network), copies(network, tag="status")
    assert 0.15 < sum(not one for one in slow) / MESSAGES < 0.35
    assert 0.2 < sum(bool(one) and one[0] > 0.4 for one in slow) / MESSAGES < 0.5
    assert all(one and one[0] < 0.5 for one in usual)


@happens
def reordering() -> None:
    delays = [delay for (delay,) in copies(placed().network)]
    assert any(second < first for first, second in itertools.pairwise(delays))


@happens
def messages_outlive_a_restart_of_their_receiver() -> None:
    world = placed()
    world.transmit("A", "B", ASK)
    world.machines["B"].life += 1
    world.advance(1.0)
    assert len(node(world, "B").events) == 1
