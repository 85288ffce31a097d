"""Provokes holes of py-libp2p 0.8.1: `python -m tests.peer.support.holes_node (stock|fixed) NAME...`.

Prints a line of JSON per scenario, {"name": NAME, "hole": WHAT}, with "" if the library behaved. Stock nodes often die
or hang instead; the parent counts that as the hole. A scenario is a function that returns what went wrong, or "".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import trio
import trio.testing

from peer.net.libp2p_fixes import apply_fixes
from tests.peer.support import holes_in_handlers, holes_in_muxer, holes_in_swarm


@dataclass(frozen=True)
class Scenario:
    provoke: Callable[[bool], Awaitable[str]]
    virtual_time: bool = False  # only over memory streams: minutes pass in milliseconds


SCENARIOS = {
    # hole 1-3: a remote peer ends the process
    "handler_raises": Scenario(holes_in_handlers.handler_raises),
    "name_not_utf8": Scenario(holes_in_handlers.name_not_utf8),
    "pubsub_garbage": Scenario(holes_in_handlers.pubsub_garbage),
    # 4: deaf after 250 inbound connections in a lifetime
    "inbound_slots_leak": Scenario(holes_in_swarm.inbound_slots_leak),
    # 5-8: the multiplexer
    "slow_reader": Scenario(holes_in_muxer.slow_reader, virtual_time=True),
    "window_flood": Scenario(holes_in_muxer.window_flood, virtual_time=True),
    "cancelled_write": Scenario(holes_in_muxer.cancelled_write, virtual_time=True),
    "silent_link": Scenario(holes_in_muxer.silent_link, virtual_time=True),
    "stuck_close": Scenario(holes_in_muxer.stuck_close, virtual_time=True),
    "no_keepalive": Scenario(holes_in_swarm.no_keepalive),
    # 9-10: dialling by peer id
    "refused_for_a_minute": Scenario(holes_in_swarm.refused_for_a_minute),
    "one_address_only": Scenario(holes_in_swarm.one_address_only),
    # 12: sockets outlive the host
    "sockets_outlive_host": Scenario(holes_in_swarm.sockets_outlive_host),
    # beyond the twelve
    "idle_sockets": Scenario(holes_in_swarm.idle_sockets),
    "streams_257": Scenario(holes_in_muxer.streams_257, virtual_time=True),
    "forged_identity": Scenario(holes_in_swarm.forged_identity),
    "addresses_without_end": Scenario(holes_in_swarm.addresses_without_end),
    "strangers_remembered": Scenario(holes_in_swarm.strangers_remembered),
    "identify_kept": Scenario(holes_in_handlers.identify_kept),
    "rsa_private_key": Scenario(holes_in_handlers.rsa_private_key),
    "endless_name": Scenario(holes_in_handlers.endless_name),
}


def main() -> None:
    library, *names = sys.argv[1:]
    if library == "fixed":
        apply_fixes()
    for name in names:
        scenario = SCENARIOS[name]
        clock = trio.testing.MockClock(autojump_threshold=0) if scenario.virtual_time else None
        hole = trio.run(scenario.provoke, library == "fixed", clock=clock)
        sys.stdout.write(json.dumps({"name": name, "hole": hole}) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
