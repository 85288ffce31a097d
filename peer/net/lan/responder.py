"""The `zeroconf` library as we use it: announce one service, and report others.

py-libp2p brings discovery of its own on top of this library, which we do not use: it announces to every libp2p program
without separating runs, opens its sockets in a constructor, blocks the event loop while it registers, resolves each
name in a thread that sleeps between tries, and notes all that it receives, without a bound.

The library has threads of its own; all calls here block, and belong into another one of ours. It keeps at most 10,000
records of others.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Final

from zeroconf import Error, ServiceBrowser, ServiceInfo, ServiceStateChange, Zeroconf

from peer.errors import NetworkError
from peer.net.lan.announcement import ADDRESSES_MAX, SERVICE

RESOLVE_MS: Final = 2000
_FAULTS: Final = (OSError, RuntimeError, Error)  # RuntimeError: no such interface


class MulticastResponder:
    """A service that is announced from `open` to `close`; after `close` it opens no more."""

    def __init__(self, name: str, ips: Sequence[str], port: int) -> None:
        self._name, self._ips, self._port = name, ips, port
        self._zeroconf: Zeroconf | None = None
        self._closed = False
        self._turn = threading.Lock()

    def open(self, on_name: Callable[[str], None]) -> None:
        """Announce the service on the interfaces of its addresses. `on_name` is called in a thread of the library with
        the name of each service that is announced there, also our own, and whenever it changes. Raises NetworkError."""

        def on_change(zeroconf: Any, service_type: str, name: str, state_change: ServiceStateChange) -> None:
            if state_change is not ServiceStateChange.Removed:
                on_name(name)

        host = f"{self._name.partition('.')[0].rpartition('-')[2]}.local."  # not this machine's name, which tells more
        info = ServiceInfo(SERVICE, self._name, port=self._port, parsed_addresses=list(self._ips), server=host)
        with self._turn:
            if self._closed:
                return
            try:
                self._zeroconf = Zeroconf(interfaces=list(self._ips))
                ServiceBrowser(self._zeroconf, SERVICE, handlers=[on_change])
                # Without a probe for others of that name, by which any machine could forbid it: it has our id in it.
                self._zeroconf.register_service(info, cooperating_responders=True)
            except _FAULTS as error:
                self._close()
                raise NetworkError(
                    f"multicast DNS cannot be used here ({str(error)[:64]}): check port 5353 of this machine, or leave"
                    " --lan out"
                ) from error

    def resolve(self, name: str) -> tuple[list[str], int]:
        """Return the IP addresses and the port of a name; nothing and 0 if no machine answers in time."""
        info = ServiceInfo(SERVICE, name)
        try:
            known = self._zeroconf is not None and info.request(self._zeroconf, RESOLVE_MS)
        except _FAULTS:  # it is being closed
            known = False
        return (info.parsed_addresses()[:ADDRESSES_MAX], info.port or 0) if known else ([], 0)

    def close(self) -> None:
        """Take the announcement back; also while `open` still runs, once it has ended."""
        self._closed = True
        with self._turn:
            self._close()

    def _close(self) -> None:
        if self._zeroconf is not None:
            with suppress(*_FAULTS):
                self._zeroconf.close()
            self._zeroconf = None
