"""Requests that name this machine as their host.

A page of another site can send a request to 127.0.0.1 from the user's browser, and by a name of its own that leads
there it can also read the answer (DNS rebinding). Such a request names that site as its host.
"""

from __future__ import annotations

from typing import Final

_OWN_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})


def names_this_machine(host_header: str, listening_at: str) -> bool:
    """Return whether the header Host of a request names this machine, or the address `listening_at`."""
    name = host_header.lower()
    without_port = name if name.endswith("]") else name.rpartition(":")[0] or name
    return without_port in _OWN_HOSTS | {listening_at.lower()}
