"""Stream handlers and protocol negotiation: what a remote peer sends may end its stream, never the node.

Stock 0.8.1 runs handlers unguarded in the nursery of the whole swarm, so any exception in one, or five bytes that are
not UTF-8 during negotiation, ends the process (holes 1, 2 and 3).
"""

from __future__ import annotations

import logging
from typing import Any

from libp2p.abc import IHost, INetStream
from libp2p.protocol_muxer.exceptions import MultiselectCommunicatorError
from libp2p.protocol_muxer.multiselect_communicator import MultiselectCommunicator

logger = logging.getLogger(__name__)


def apply() -> None:
    """Make negotiation treat undecodable names as the negotiation error they are."""
    stock_read = MultiselectCommunicator.read

    async def read(self: MultiselectCommunicator) -> str:
        try:
            return await stock_read(self)
        except UnicodeDecodeError as error:
            raise MultiselectCommunicatorError("protocol name is not UTF-8") from error

    MultiselectCommunicator.read = read  # type: ignore[method-assign]


def harden(host: IHost) -> None:
    """Contain what any stream handler of this host raises: the stream is reset, the host lives on."""
    network: Any = host.get_network()
    inner = network.common_stream_handler

    async def contained(stream: INetStream) -> None:
        # This is the edge between the library and whatever a peer made a handler do, so it is broad on purpose.
        try:
            await inner(stream)
        except Exception as error:
            logger.debug("stream ended by %r", error)
            await stream.reset()

    network.set_stream_handler(contained)
