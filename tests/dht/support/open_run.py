"""Guarded hosts for the tests, as in a run: each admits every peer that asks, and trusts those that it is told to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

import msgspec

from peer.net.host import Host
from peer.net.rpc import Call, Method


class Greeting(msgspec.Struct, frozen=True):
    """Stands for what two peers prove to each other when they enter a run."""


ENTER: Final = Method("test/enter", Greeting, Greeting, access="open")


def guard(host: Host, *, members: Iterable[str] = (), is_open: bool = True) -> None:
    """Guard a host. `members` are trusted; in a closed run the others are let in as clients."""
    members = frozenset(members)
    admissions = host.admissions
    admissions.guard()
    admissions.trust("head", members)

    def grant(peer: str) -> None:
        is_member = peer in members
        admissions.grant(peer, "member" if is_open or is_member else "client", trusted=not is_open and is_member)

    async def enter(call: Call[Greeting]) -> Greeting:
        grant(call.peer)
        return Greeting()

    async def introduce(peer: str, timeout_s: float) -> None:
        await host.rpc.call(peer, ENTER, Greeting(), timeout_s=timeout_s)
        grant(peer)

    host.rpc.register(ENTER, enter)
    host.rpc.introduce = introduce
