"""What the round engine must know of a method of agreeing on weights.

A *recipe* is one peer's copy of a method. It has a shared half, the same at every member and a pure function of the
last commit (coding, weights, step), and a private half that belongs to this peer alone (encode, memory, take_back):

    work of the worker --encode--> slices --merge (a slice's owner)--> result --updates--> step_into --> next state

Vectors are flat, fp32, in the canonical order of the run's layout; P: its length; m <= P: the length of one round's
message before it is coded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from optim.codecs import Buffer
from optim.merge import contribution_weights
from optim.schedule import RoundInfo as RoundInfo

Product = Literal["delta", "gradient"]


@dataclass(frozen=True)
class Sent:
    """What a contributor committed to for one slice, and its weight in the merge: blake3 hash, squared norm of the
    decoded values (float64)."""

    hash: bytes
    sqnorm: float
    weight: float


class Coding(ABC):
    """How one round's messages cross the wire, cut into `count` slices, each coded, merged and applied by itself.

    `places`: the stretches of the flat vector that the round changes, in order; together m values."""

    places: tuple[slice, ...]
    count: int

    @abstractmethod
    def message_bytes(self, index: int) -> int:
        """The exact size of a contributor's slice."""

    @abstractmethod
    def message_sqnorm(self, index: int, data: Buffer) -> float:
        """Of what a contributor's slice decodes to; `ProtocolViolation` if it does not decode."""

    @abstractmethod
    def merge(self, index: int, messages: Sequence[Buffer], weights: Sequence[float]) -> torch.Tensor:
        """The owner's part: contributors' slices, in the roster's order, to the one result everybody decodes (uint8).
        The same bits whoever computes it. `ProtocolViolation` if a message does not decode."""

    @abstractmethod
    def result_bytes(self, index: int, senders: int) -> int:
        """The exact size of a result merged from so many contributors."""

    @abstractmethod
    def check_result(self, index: int, data: Buffer, sent: Sequence[Sent]) -> None:
        """`ProtocolViolation` if `data` does not decode or cannot be what the owner should have made of `sent`."""

    @abstractmethod
    def updates(self, index: int, data: Buffer) -> Iterator[tuple[slice, torch.Tensor]]:
        """The merged update, piece after piece: where in the flat vector, and its values. A piece is small enough for
        the cache and is valid until the next is taken. `ProtocolViolation` if `data` does not decode."""


class OuterStrategy(ABC):
    """One peer's copy of a method. `shared`: names of the vectors (P,) besides theta that all members hold, zero at
    the run's beginning. `product`: what the worker is asked for, theta - local after its inner steps, or the mean
    gradient over its samples. `elementwise`: whether `step_into` may be called on any piece by itself.

    `encode` and `restore_residual` are called one after the other, but in threads of the caller's choice."""

    shared: ClassVar[tuple[str, ...]] = ()
    product: ClassVar[Product] = "delta"
    elementwise: ClassVar[bool] = True

    # -- shared: pure ------------------------------------------------------------------------------------------------

    @abstractmethod
    def coding(self, round_info: RoundInfo, state: Sequence[torch.Tensor]) -> Coding:
        """Of that round; `state` is [theta, *shared] before it, only read."""

    @abstractmethod
    def step_into(
        self, round_info: RoundInfo, after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], update: torch.Tensor
    ) -> None:
        """Write the state after the round: `after` and `before` are (the same piece of) [theta, *shared], `update` the
        merged update there. One IEEE rounding an operation: all CPUs must get the same bits."""

    def weights(self, tokens: Sequence[int], norms: Sequence[float]) -> tuple[float, ...]:
        """Each contributor's weight in the merge, 0 for one that is left out. `tokens`: its work; `norms`: L2 norm of
        its whole message."""
        return contribution_weights(tokens, norms)

    # -- private -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def encode(
        self, round_info: RoundInfo, coding: Coding, product: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> list[float]:
        """My message of this round into `out` (uint8, one a slice); returns the slices' squared norms. `product`: what
        the worker made at the coding's places, (m,), only read. What the message leaves out is kept for the next one.
        `ProtocolViolation` if the product is not finite."""

    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        """The vectors that `encode` of that coding keeps for the next message, to be copied and written back."""
        return ()

    @abstractmethod
    def restore_residual(self, round_info: RoundInfo, coding: Coding, messages: Sequence[Buffer]) -> None:
        """My message of that round was not merged after all: a method with memory keeps what it held for the next
        one."""
