"""Stream handlers and protocol negotiation: bytes from a peer may end its stream, never the node.

Stock 0.8.1 runs handlers unguarded in the nursery of the whole swarm. An exception in one of them, or five bytes that
are not UTF-8 during negotiation, ends the process. It reads protocol names of any announced length
into memory. Besides Noise and Yamux a host offers transports that prove no identity (plaintext) or that are unguarded
(secio, mplex), and the dialler chooses among them.
"""

from __future__ import annotations

import logging
from typing import Any, Final

from libp2p.abc import IHost, INetStream
from libp2p.exceptions import ParseError
from libp2p.io.abc import Reader
from libp2p.protocol_muxer import multiselect_communicator
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator
from libp2p.security.noise.transport import PROTOCOL_ID as NOISE
from libp2p.stream_muxer.yamux.yamux import PROTOCOL_ID as YAMUX
from libp2p.utils.varint import read_varint_prefixed_bytes_limited

from peer.net.libp2p_fixes.counts import count_once
from peer.net.libp2p_fixes.identify import drop_identify
from peer.net.libp2p_fixes.peer_cleanup import forget_disconnected

logger = logging.getLogger(__name__)

PROTOCOL_NAME_BYTES_MAX: Final = 1024  # as in go-multistream


def apply() -> None:
    """Bound the names read in negotiation, and make an undecodable one a negotiation error."""
    stock_read = MultiselectCommunicator.read

    async def read(self: MultiselectCommunicator) -> str:
        try:
            return await stock_read(self)
        except UnicodeDecodeError as error:
            raise MultiselectCommunicatorError("a protocol name that is not UTF-8") from error

    MultiselectCommunicator.read = read  # type: ignore[method-assign]
    multiselect_communicator.read_delim = _read_name  # type: ignore[attr-defined]


async def _read_name(reader: Reader) -> bytes:
    """Read one newline-terminated name. Raises ParseError or an IOException (MessageTooLarge)."""
    line = await read_varint_prefixed_bytes_limited(reader, PROTOCOL_NAME_BYTES_MAX)
    if not line.endswith(b"\n"):
        raise ParseError("a protocol name without its newline")
    return line[:-1]


def harden(host: IHost) -> None:
    """Contain exceptions of this host's stream handlers, allow only Noise and Yamux, drop identify, forget who left,
    count connections once."""
    network: Any = host.get_network()
    count_once(network)
    drop_identify(host)
    forget_disconnected(network)
    _keep_only(network.upgrader.security_multistream, NOISE)
    _keep_only(network.upgrader.muxer_multistream, YAMUX)
    inner = network.common_stream_handler

    async def contained(stream: INetStream) -> None:
        # The edge between the library and a handler: broad on purpose, because the library's handlers (ping, relay,
        # DHT) let through whatever their parsers raise. Our own handlers catch their errors.
        try:
            await inner(stream)
        except Exception as error:  # noqa: BLE001
            logger.debug("a stream of %s ended by %r", stream.muxed_conn.peer_id, error)
            await stream.reset()

    network.set_stream_handler(contained)


def _keep_only(multistream: Any, protocol: str) -> None:
    for offered in list(multistream.transports):
        if offered != protocol:
            del multistream.transports[offered]
            multistream.multiselect.remove_handler(offered)
