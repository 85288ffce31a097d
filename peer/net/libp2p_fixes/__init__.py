"""Everything Barnraise changes in py-libp2p 0.8.1, one file a theme, each change with a test that fails without it.

As released, a remote peer can crash, hang, deafen or fill a py-libp2p node, or pass for somebody else.

    handlers    a failing stream handler ends its stream, not the node; bounded protocol names; Noise and Yamux only
    inbound     slots are given back when a connection closes; unfinished handshakes are few, per address, and short
    dialing     every address is tried, at once; a peer that failed is dialled again as soon as one asks
    sockets     dead links are noticed by the kernel; a stuck connection can be dropped by force
    yamux       the receive window holds; a write waits as long as its caller lets it, and can be cancelled anywhere
    forgetting  what is kept of a peer ends with its last connection
    throughput  the same bytes on the wire for a third of the CPU

`apply_fixes()` patches the library once a process, before the first host is made; `harden(host)` completes each host.
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Final

from peer.errors import ConfigError
from peer.net.libp2p_fixes import dialing, handlers, sockets, yamux
from peer.net.libp2p_fixes import inbound_limits as inbound
from peer.net.libp2p_fixes import noise as throughput
from peer.net.libp2p_fixes.handlers import harden
from peer.net.libp2p_fixes.sockets import abort_connection

__all__ = ["abort_connection", "apply_fixes", "harden"]

SUPPORTED_VERSION: Final = "0.8.1"
_applied = False


def apply_fixes() -> None:
    """Patch py-libp2p for this process. Idempotent; call it before a host is made.

    Raises ConfigError when another version than 0.8.1 is installed: the fixes touch internals that move.
    """
    global _applied
    if _applied:
        return
    installed = metadata.version("libp2p")
    if installed != SUPPORTED_VERSION:
        raise ConfigError(
            f"py-libp2p {installed} is installed but only {SUPPORTED_VERSION} is known to be safe: "
            f"run `pip install libp2p=={SUPPORTED_VERSION}`"
        )
    for theme in (handlers, inbound, dialing, sockets, yamux, throughput):
        theme.apply()
    _quiet_logging()
    _applied = True


def _quiet_logging() -> None:
    """Peers come and go: the library's stack traces about it would drown ours. Set LIBP2P_DEBUG to see them."""
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    # Some of its modules log through the root logger, where a level would silence the whole process.
    logging.getLogger().addFilter(_is_not_from_libp2p)


def _is_not_from_libp2p(record: logging.LogRecord) -> bool:
    return "/libp2p/" not in record.pathname.replace("\\", "/") or record.levelno >= logging.CRITICAL
