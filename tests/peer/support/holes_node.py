"""Provokes holes of py-libp2p 0.8.1: `python -m tests.peer.support.holes_node (stock|fixed) NAME...`.

Prints a line of JSON per scenario, {"name": NAME, "hole": WHAT}, with "" if the library behaved. Stock nodes often die
or hang instead, which is the hole: each runs in a fork. A scenario is a function that returns what went wrong, or "".
"""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

import trio
import trio.testing

from peer.net.libp2p_fixes import apply_fixes
from tests.peer.support import holes_in_handlers, holes_in_muxer, holes_in_swarm

STOCK_S: Final = 60


@dataclass(frozen=True)
class Scenario:
    provoke: Callable[[bool], Awaitable[str]]
    virtual_time: bool = False  # only over memory streams: minutes pass in milliseconds


SCENARIOS = {
    # a remote peer ends the process
    "handler_raises": Scenario(holes_in_handlers.handler_raises),
    "name_not_utf8": Scenario(holes_in_handlers.name_not_utf8),
    "pubsub_garbage": Scenario(holes_in_handlers.pubsub_garbage),
    # deaf after 250 inbound connections in a lifetime
    "inbound_slots_leak": Scenario(holes_in_swarm.inbound_slots_leak),
    # the multiplexer
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
            run(name, fixed=True)
    else:
        in_forks(names)


def run(name: str, fixed: bool) -> None:
    scenario = SCENARIOS[name]
    clock = trio.testing.MockClock(autojump_threshold=0) if scenario.virtual_time else None
    tell(name, trio.run(scenario.provoke, fixed, clock=clock))


def tell(name: str, hole: str) -> None:
    os.write(1, json.dumps({"name": name, "hole": hole}).encode() + b"\n")  # a whole line, whoever else writes


def in_forks(names: list[str]) -> None:
    """Run each scenario in a process of its own, which it may end or hang: two at a time, each for STOCK_S at most."""
    running: dict[int, str] = {}
    waiting = list(names)
    while waiting or running:
        while waiting and len(running) < 2:
            name = waiting.pop(0)
            if child := os.fork():
                running[child] = name
                continue
            signal.alarm(STOCK_S)  # which ends it, even where it no longer runs any Python
            code = 1
            try:
                run(name, fixed=False)
                code = 0
            except BaseException:  # noqa: BLE001  as the interpreter does; this fork must not go on with the loop
                sys.excepthook(*sys.exc_info())
            finally:
                os._exit(code)
        child, status = os.wait()
        name, code = running.pop(child), os.waitstatus_to_exitcode(status)
        if code == -signal.SIGALRM:
            tell(name, f"no end within {STOCK_S} s")
        elif code:
            tell(name, f"the node died with {code}")


if __name__ == "__main__":
    main()
