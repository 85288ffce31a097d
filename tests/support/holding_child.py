"""Attackers that announce slices of 8 MiB and send one byte of each: what `tests.peer.support.attack_child` is told."""

from __future__ import annotations

import trio

from swarm.protocol.messages import CONTRIBUTION, SliceOf
from tests.peer.support import attack_child
from tests.peer.support.victim_child import SLICE

if __name__ == "__main__":
    held = attack_child.frame(CONTRIBUTION, SliceOf(bytes(32), 0), SLICE) + bytes(1)
    attack_child.ATTACKS["slices"] = held
    trio.run(attack_child.main)
