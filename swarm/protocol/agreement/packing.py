"""Long messages of the agreement are sent deflated: names, hashes and the words of each signed body repeat in them.

The signed bodies inside are byte for byte what was signed. The unpacked size is bounded, and only those kinds are
packed that every receiver passes to the node unfiltered."""

from __future__ import annotations

import zlib
from typing import Final

import msgspec

from peer.decoding import MALFORMED
from peer.errors import ProtocolViolation
from swarm.protocol.agreement import messages as msg
from swarm.protocol.agreement.messages import UNPACKED_MAX

PACKED_MIN: Final = 4096  # bytes as they are; below, little is saved
GROWS_MAX: Final = 8  # times; rosters, plans and certificates grow to about three times
LEVEL: Final = 1  # a third of the time of the usual one, and 1 % more bytes
KINDS: Final = msg.ChainMessage | msg.PlanMessage | msg.ProposalMessage | msg.RosterMessage | msg.ShortProposalMessage


class Packer:
    """Packs messages, each once though it goes to many peers."""

    def __init__(self) -> None:
        self._last: tuple[msg.Message, msg.Message] | None = None

    def pack(self, message: msg.Message) -> msg.Message:
        """Return the message to send in the place of this one: itself, if it is short or another kind."""
        if not isinstance(message, KINDS):
            return message
        if self._last is None or self._last[0] is not message:
            self._last = (message, _packed(message))
        return self._last[1]


def _packed(message: msg.Message) -> msg.Message:
    encoded = _ENCODER.encode(message)
    if not PACKED_MIN <= len(encoded) <= UNPACKED_MAX:
        return message
    deflated = zlib.compress(encoded, LEVEL)
    return msg.PackedMessage(deflated) if len(encoded) <= GROWS_MAX * len(deflated) else message


def unpacked(message: msg.Message) -> msg.Message:
    """Return what is in a packed message; any other one as it is. Raises `ProtocolViolation` if it is malformed."""
    if not isinstance(message, msg.PackedMessage):
        return message
    most = min(UNPACKED_MAX, GROWS_MAX * len(message.deflated))
    inflater = zlib.decompressobj()
    try:
        found: msg.Message = _DECODER.decode(inflater.decompress(message.deflated, most))
    except (zlib.error, *MALFORMED) as error:
        raise ProtocolViolation("a packed message is malformed") from error
    if not inflater.eof or inflater.unused_data:
        raise ProtocolViolation("a packed message is cut short, or longer than it may be")
    return found


_ENCODER: Final = msgspec.msgpack.Encoder()
_DECODER: Final = msgspec.msgpack.Decoder(KINDS)
