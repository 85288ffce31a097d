"""All changes to py-libp2p 0.8.1, one file a theme. Each change has a test that fails without it.

As released, a remote peer can crash, hang, deafen or fill a py-libp2p node, or pass for another peer.

    handlers        a failing stream handler ends its stream, not the node; bounded protocol names; Noise and Yamux only
    keys            public keys are Ed25519 in 36 bytes; nothing else reaches a parser
    identify        served by and asked of relays only, and not pushed
    inbound_limits  a closed connection frees its slot; unfinished handshakes are few, few per network, and short
    dialing         all addresses are tried at once; a peer that failed may be dialled again at once
    sockets         the kernel notices dead links; a stuck connection can be dropped by force
    yamux           the receive window is enforced; a write waits as long as its caller lets it, and may be cancelled;
                    a peer that opens streams for nothing is dropped
    peer_cleanup    the library's data about a peer ends with its last connection
    noise           the same bytes on the wire for a third of the CPU
    streams         calls do without the library's negotiation, locks and notices
    counts          one count of connections; what ends by a cancelled task is forgotten too

`apply_fixes()` patches the library once a process, before the first host is made. `harden(host)` completes each host.
"""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Final

from peer.errors import ConfigError
from peer.net.libp2p_fixes import counts, dialing, handlers, inbound_limits, keys, noise, sockets, streams, yamux
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
    for theme in (keys, handlers, inbound_limits, dialing, sockets, yamux, noise, streams, counts):
        theme.apply()
    _quiet_logging()
    _applied = True


def _quiet_logging() -> None:
    """Silence the library's stack traces about peers that come and go. Set LIBP2P_DEBUG to see them."""
    logging.getLogger("libp2p").setLevel(logging.CRITICAL)
    # Some of its modules log by the root logger, where a level would silence the whole process.
    logging.getLogger().addFilter(_is_not_from_libp2p)


def _is_not_from_libp2p(record: logging.LogRecord) -> bool:
    return "/libp2p/" not in record.pathname.replace("\\", "/") or record.levelno >= logging.CRITICAL
