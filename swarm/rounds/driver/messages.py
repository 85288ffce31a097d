"""The call that carries the messages of the agreement between two peers of a group."""

from __future__ import annotations

from typing import Final

import msgspec

from peer.bounds import Name
from peer.net.method import Method
from peer.net.wire import LARGE_HEADER_BYTES
from swarm.protocol.agreement.messages import Message
from swarm.protocol.messages import Done


class Letter(msgspec.Struct, frozen=True):
    """One message of the agreement of one group."""

    group: Name
    """The group's id (a head's `run_id`): the coordinator takes part in the groups of all stages."""
    message: Message


AGREE: Final = Method("agreement.message", Letter, Done, header_bytes=LARGE_HEADER_BYTES)
MESSAGE_BYTES_MAX: Final = LARGE_HEADER_BYTES - (4 << 10)  # room for the rest of a header
