"""The parts of a call: its method, the request as the handler sees it, the reply as the caller sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

import msgspec

from peer.net.admissions import Access
from peer.net.wire import HEADER_BYTES, Buffer

Req = TypeVar("Req", bound=msgspec.Struct)
Rep = TypeVar("Rep", bound=msgspec.Struct)


class Empty(msgspec.Struct, frozen=True):
    """The body of a call, or of an answer, that has no fields: the method's name, and the payload if there is one, say
    all."""


@dataclass(frozen=True)
class Method(Generic[Req, Rep]):
    """A name with typed bodies and payload limits in bytes."""

    name: str
    request: type[Req]
    reply: type[Rep]
    request_payload_max: int = 0
    reply_payload_max: int = 0
    access: Access = "member"
    """The access that a peer must have proved, to call it and to be called by it (`peer.net.admissions`)."""
    replies_bounded: bool = False
    """Whether its handler bounds the memory of its replies itself, or sends views of what is held anyway."""
    header_bytes: int = HEADER_BYTES
    """Largest header of a request or reply. A larger request than `HEADER_BYTES` is read only from admitted peers."""
    urgent: bool = False
    """Whether it may exceed the number of calls open to one peer: those calls may depend on it."""


@dataclass(frozen=True)
class Call(Generic[Req]):
    """One inbound call. `peer` is authenticated; the handler may keep `payload`."""

    peer: str
    body: Req
    payload: memoryview


@dataclass(frozen=True)
class Reply(Generic[Rep]):
    """A handler's answer."""

    body: Rep
    payload: memoryview


Handler = Callable[[Call[Req]], Awaitable[Rep | tuple[Rep, Buffer]]]
Check = Callable[[str, Req, int], Awaitable[None]]
"""Sees (peer, body, payload size) before the payload is read; raises what the handler would, to refuse it."""
