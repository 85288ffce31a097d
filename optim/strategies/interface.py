"""The interface between the round engine and a method of agreeing on weights.

A strategy is one peer's copy of a method. Its shared part (coding, weights, step) is a pure function of the last
commit, the same at every member. Its private part (encode, memory, restore_residual) belongs to this peer:

    worker's product --encode--> slices --merge (a slice's owner)--> result --updates--> step_into --> next state

Vectors are flat, fp32, in the canonical order of the run's layout. P: its length; m <= P: the length of one round's
message before it is coded.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch

from optim.codecs import Buffer
from optim.merge import contribution_weights
from optim.schedule import RoundInfo as RoundInfo

Product = Literal["delta", "gradient"]
NewVector = Callable[[int], torch.Tensor]
"""Makes a vector of a method's memory: fp32 zeros of that length, wherever this peer keeps its states."""
Check = Callable[[], None]
"""Called now and then in a long computation. It raises to end that."""


def go_on() -> None:
    """Let a computation continue to its end."""


def in_memory(numel: int) -> torch.Tensor:
    """Return fp32 zeros of shape (numel,) in the machine's memory."""
    return torch.zeros(numel, dtype=torch.float32)


@dataclass(frozen=True)
class Sent:
    """A contributor's commitment to one bundle (`optim.bundles`), and its weight in the merge."""

    hash: bytes
    """Of the encoded slices: that of `bundle_hash`."""
    sqnorm: float
    """Squared norm of the decoded values of all of them, float64."""
    weight: float


class Coding(ABC):
    """The form of one round's messages: slices that are coded, merged and applied separately."""

    places: tuple[slice, ...]
    """The spans of the flat vector that the round changes, in order; together m values."""
    count: int
    """Slices of a message."""

    @abstractmethod
    def message_bytes(self, index: int) -> int:
        """Return the size of a contributor's slice in bytes."""

    @abstractmethod
    def message_sqnorm(self, index: int, data: Buffer) -> float:
        """Return the squared norm of a decoded slice; `ProtocolViolation` if it does not decode."""

    @abstractmethod
    def merge(self, index: int, messages: Sequence[Buffer], weights: Sequence[float]) -> torch.Tensor:
        """Merge contributors' slices, in the roster's order, into the result that all members decode (uint8).

        This is the owner's part; every peer would get the same bits. `ProtocolViolation` if a message does not
        decode."""

    @abstractmethod
    def result_bytes(self, index: int, senders: int) -> int:
        """Return the size in bytes of a result of this many contributors."""

    @abstractmethod
    def check_result(self, indices: Sequence[int], results: Sequence[Buffer], sent: Sequence[Sent]) -> None:
        """Raise `ProtocolViolation` if the results of a bundle's slices do not decode or cannot be the merge of
        `sent`."""

    @abstractmethod
    def updates(self, index: int, data: Buffer) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield the merged update in pieces: a span of the flat vector and its values.

        A piece fits in the cache and is valid until the next one. `ProtocolViolation` if `data` does not decode."""


class OuterStrategy(ABC):
    """One peer's copy of a method. `encode` and `restore_residual` are never called at the same time, but may be called
    in different threads."""

    shared: ClassVar[tuple[str, ...]] = ()
    """Names of the vectors (P,) besides theta that all members hold; 0 at the start of the run."""
    product: ClassVar[Product] = "delta"
    """The worker's result: theta - local after its inner steps, or the mean gradient over its samples."""
    elementwise: ClassVar[bool] = True
    """Whether `step_into` may be called on any piece separately."""

    check_by_loss: float = 0.0
    """The share of the commits after which a member checks another's update by the loss; 0 where no method asks."""

    # -- shared: pure ------------------------------------------------------------------------------------------------

    @abstractmethod
    def coding(self, round_info: RoundInfo, state: Sequence[torch.Tensor], check: Check = go_on) -> Coding:
        """Return the round's coding. `state`: [theta, *shared] before the round, only read. `check` is called now and
        then where that takes long; what it raises ends the call."""

    @abstractmethod
    def slices(self, round_info: RoundInfo) -> int:
        """Return how many slices the round's coding has, whatever the state."""

    @abstractmethod
    def step_into(
        self, round_info: RoundInfo, after: Sequence[torch.Tensor], before: Sequence[torch.Tensor], update: torch.Tensor
    ) -> None:
        """Write the state after the round. `after`, `before`: the same piece of [theta, *shared]; `update`: the merged
        update there. All CPUs must get the same bits: one IEEE rounding an operation."""

    def apply(
        self,
        round_info: RoundInfo,
        coding: Coding,
        index: int,
        result: Buffer,
        after: Sequence[torch.Tensor],
        before: Sequence[torch.Tensor],
    ) -> None:
        """Make `step_into` with a slice's encoded result, where it changes the state. `after`, `before`: all of [theta,
        *shared]. `ProtocolViolation` if the result does not decode; `after` may be partly written then.

        One piece at a time: the old state is read once, the new one written once, and the decoded update stays in the
        cache."""
        for place, update in coding.updates(index, result):
            self.step_into(round_info, [t[place] for t in after], [t[place] for t in before], update)

    def weights(self, tokens: Sequence[int], norms: Sequence[float]) -> tuple[float, ...]:
        """Return each contributor's weight in the merge; 0 leaves it out. `tokens`: its work; `norms`: L2 norm of its
        whole message."""
        return contribution_weights(tokens, norms)

    # -- private -----------------------------------------------------------------------------------------------------

    @abstractmethod
    def encode(
        self, round_info: RoundInfo, coding: Coding, product: torch.Tensor, out: Sequence[torch.Tensor]
    ) -> list[float]:
        """Write this peer's message into `out` (uint8, one a slice) and return the slices' squared norms.

        `product`: the worker's product at the coding's places, (m,), only read. A method with error feedback keeps the
        coding error for the next message. `ProtocolViolation` if the product is not finite."""

    def memory(self, coding: Coding) -> Sequence[torch.Tensor]:
        """Return the vectors that `encode` of that coding keeps for the next message, to be copied and written back."""
        return ()

    @abstractmethod
    def restore_residual(self, round_info: RoundInfo, coding: Coding, messages: Sequence[Buffer]) -> None:
        """Add a message that was not merged to the memory again, so that the next message contains it."""
