"""TCP ports of 127.0.0.1 on which nothing listens, though other tests run meanwhile."""

from __future__ import annotations

import random
import socket
from collections.abc import Iterator
from contextlib import contextmanager

_CHOSEN = range(10_000, 30_000)  # the kernel gives none of these to who asks for any port, nor to who dials out


def free_port() -> int:
    """A port to listen on later."""
    while True:
        port = random.SystemRandom().choice(_CHOSEN)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@contextmanager
def refusing_port() -> Iterator[int]:
    """A port that refuses connections: it is bound, so that nobody else gets it, and nobody listens."""
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        yield int(holder.getsockname()[1])
