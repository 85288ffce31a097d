"""The call that carries messages of the agreement from one peer of a group to another."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec

from peer.bounds import Name
from peer.net.method import Empty, Method
from peer.net.wire import LARGE_HEADER_BYTES
from swarm.protocol.agreement.messages import Message

MESSAGES_MAX: Final = 16


class MessageBatch(msgspec.Struct, frozen=True):
    """Messages of the agreement of one group, in order."""

    group: Name
    """The group's id (a head's `run_id`): the coordinator takes part in the groups of all stages."""
    messages: Annotated[tuple[Message, ...], msgspec.Meta(max_length=MESSAGES_MAX)]


AGREE: Final = Method("agreement.messages", MessageBatch, Empty, header_bytes=LARGE_HEADER_BYTES)
BATCH_BYTES_MAX: Final = LARGE_HEADER_BYTES - (4 << 10)  # room for the rest of a header
