"""The host that a request names: whether it is one, and whether it is this machine.

A page of another site can send a request to 127.0.0.1 from the user's browser, and by a name of its own that leads
there it can also read the answer (DNS rebinding). Such a request names that site as its host.
"""

from __future__ import annotations

import re
from ipaddress import AddressValueError, IPv6Address
from typing import Final

_OWN_HOSTS: Final = frozenset({"localhost", "127.0.0.1", "[::1]"})

_HOST: Final = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|[A-Za-z0-9._~%!$&'()*+,;=-]*)(?::[0-9]{0,5})?")


def is_host(host_header: str) -> bool:
    """Return whether the header Host of a request names a host, as RFC 3986 writes one."""
    found = _HOST.fullmatch(host_header)
    if found is None:
        return False
    try:
        return found[1] is None or bool(IPv6Address(found[1]))
    except AddressValueError:
        return False


def names_this_machine(host_header: str, listening_at: str) -> bool:
    """Return whether the header Host of a request names this machine, or the address `listening_at`."""
    name = host_header.lower()
    without_port = name if name.endswith("]") else name.rpartition(":")[0] or name
    return without_port in _OWN_HOSTS | {listening_at.lower()}
