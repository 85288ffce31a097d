"""What a call is: its method, its request as the handler sees it, its reply as the caller sees it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import msgspec

from peer.net.wire import Buffer

Req = TypeVar("Req", bound=msgspec.Struct)
Rep = TypeVar("Rep", bound=msgspec.Struct)


@dataclass(frozen=True)
class Method(Generic[Req, Rep]):
    """A name with typed bodies and payload limits in bytes. `open`: also for peers the gate has not admitted. `urgent`:
    it does not wait while all the calls that we keep open to that peer are taken: they may need it."""

    name: str
    request: type[Req]
    reply: type[Rep]
    request_payload_max: int = 0
    reply_payload_max: int = 0
    open: bool = False
    urgent: bool = False


@dataclass(frozen=True)
class Call(Generic[Req]):
    """One inbound call. `peer` is authenticated; `payload` is ours to keep."""

    peer: str
    body: Req
    payload: memoryview


@dataclass(frozen=True)
class Reply(Generic[Rep]):
    """What a handler answered."""

    body: Rep
    payload: memoryview


Handler = Callable[[Call[Req]], Awaitable[Rep | tuple[Rep, Buffer]]]
Gate = Callable[[str, Method[Any, Any]], None]


def admit_everybody(peer: str, method: Method[Any, Any]) -> None:
    """The gate of a host that belongs to no run."""
