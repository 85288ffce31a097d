"""How much of a step is on a device at a time: sequences, and what of a block is computed a second time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Annotated, Final

import msgspec

from peer.footprint.device import device_items, step_bytes
from peer.footprint.workload import DeviceKind, Recompute, Workload

RECOMPUTE: Final[tuple[Recompute, ...]] = ("none", "selective", "full")
"""From the fastest to the smallest."""
USED: Final = 0.85
"""The share of free memory that a step may take."""
_ENOUGH: Final[Mapping[DeviceKind, int]] = {"cpu": 256, "cuda": 4096, "mps": 2048}
"""Tokens at a time that keep a device busy: below it a recomputation with more tokens is the faster choice."""


class StepSize(msgspec.Struct, frozen=True):
    """`sequences` are on the device at a time, a micro-batch; their gradients are added up."""

    sequences: Annotated[int, msgspec.Meta(ge=1, le=1 << 20)]
    recompute: Recompute = "none"

    @property
    def smaller(self) -> StepSize | None:
        """The next one to try where memory ran out; None if there is none."""
        if self.sequences > 1:
            return StepSize(self.sequences // 2, self.recompute)
        rest = RECOMPUTE[RECOMPUTE.index(self.recompute) + 1 :]
        return StepSize(1, rest[0]) if rest else None


SMALLEST: Final = StepSize(1, RECOMPUTE[-1])


def doubled(batch: int) -> Iterator[int]:
    """Yield the micro-batches to try: 1, 2, 4, and the whole batch at the end."""
    size = 1
    while size < batch:
        yield size
        size *= 2
    yield batch


def is_enough(size: StepSize, batch: int, seq_len: int, device: DeviceKind) -> bool:
    """Whether a larger micro-batch would hardly be faster."""
    return size.sequences >= batch or size.sequences * seq_len >= _ENOUGH[device]


def step_that_fits(work: Workload, device_bytes: float) -> StepSize | None:
    """Return the fastest step of `work.inner` that takes at most `USED` of what the state leaves of `device_bytes`, by
    arithmetic; None if not even the smallest does. Of several devices each has its share of the batch."""
    batch, best = -(-work.inner.batch_size // work.layout.batches), None
    room = USED * (device_bytes - sum(device_items(work).values()) + step_bytes(work))
    for recompute in RECOMPUTE:
        for sequences in doubled(batch):
            size = StepSize(sequences, recompute)
            if step_bytes(sized(work, size)) > room:
                break
            if best is None or size.sequences > best.sequences:
                best = size
        if best is not None and is_enough(best, batch, work.seq_len, work.device):
            return best
    return best


def sized(work: Workload, size: StepSize) -> Workload:
    """Return the work with steps of that size."""
    return replace(work, sequences=size.sequences, recompute=size.recompute)
