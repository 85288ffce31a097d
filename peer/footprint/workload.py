"""The demands on a machine, and the answer: bytes by item."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final, Literal

from peer.config import InnerConfig, MasterType, ModelConfig, StorageConfig
from peer.footprint.layout import Layout
from peer.footprint.parameters import Shape, parameter_count, parameter_shapes

FLOAT_BYTES: Final = 4
SPLIT_BYTES: Final = 3
"""Of a weight in bf16 and the correction of its rounding."""
DeviceKind = Literal["cpu", "cuda", "mps"]
Product = Literal["delta", "gradient"]
Recompute = Literal["none", "selective", "full"]
"""The part computed a second time for the backward pass: nothing, all but matrix products and the attention, or all of
a block."""


@dataclass(frozen=True, kw_only=True)
class ExchangeSize:
    """A method's memory and messages. P: parameters; m: values of one message, P / fragments."""

    state_vectors: int
    """Vectors (P,) that all members hold: theta and the method's own."""
    up: float
    """Bytes a value of a contributor's message."""
    result: float
    """Bytes a value of the merged result; where it is made of all messages, of all of them together."""
    peers: int
    """Contributors of a round."""
    private_vectors: float = 0.0
    """Vectors (P,) of this peer's own: coding errors, momentum, offsets."""
    memory_vectors: float = 0.0
    """Of these, what the method itself remembers: it lies where the state does."""
    is_merged_whole: bool = False
    """The merged update is gathered before the step, in one vector more."""
    product: Product = "delta"
    fragments: int = 1
    overlap_steps: float = 0.0
    """Inner steps made while an exchange lasts."""
    is_common: bool = True
    """Whether there is one state, voted on; the next one is built beside the current one."""

    @property
    def traffic(self) -> float:
        """Bytes a value of a message that a peer sends in one exchange, and receives."""
        if not self.is_common:
            return self.up + self.result
        return (self.up + self.result) * (self.peers - 1) / self.peers


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One peer's part of a run. `blocks`: those of its stage."""

    model: ModelConfig
    inner: InnerConfig
    exchange: ExchangeSize
    blocks: range
    seq_len: int
    sequences: int
    """Sequences that are on one device at a time."""
    recompute: Recompute = "none"
    is_stage: bool = False
    """Whether the model is cut into stages, of which these blocks are one."""
    is_synchronous: bool = False
    """Whether a stage keeps the weights of the step before."""
    device: DeviceKind = "cpu"
    narrow: bool = False
    """Whether products are in 16 bits, bf16 or fp16."""
    weights: MasterType = "fp32"
    """How the device holds the weights."""
    state_on_disk: bool = False
    """Whether the states lie in files, which memory only caches (`peer.checkpoint.generation`)."""
    layout: Layout = field(default_factory=Layout)
    base: StorageConfig | None = None
    """Of a model with an adapter: the form of its frozen weights."""

    @cached_property
    def shapes(self) -> tuple[tuple[str, Shape], ...]:
        return tuple(parameter_shapes(self.model, self.blocks))

    @cached_property
    def parameters(self) -> int:
        return parameter_count(self.model, self.blocks)

    @property
    def vector_bytes(self) -> int:
        """One fp32 vector of all parameters."""
        return FLOAT_BYTES * self.parameters

    @property
    def is_split(self) -> bool:
        return self.weights == "split"

    @property
    def cast_bytes(self) -> int:
        """What a weight takes once more in the type of the products, where it is held in another: 0 if it is not."""
        if self.is_split:
            return 0 if self.narrow else FLOAT_BYTES
        return 2 if self.narrow else 0

    @property
    def trained_parts(self) -> int:
        """The ranks that share one copy of what is trained: an adapter is whole at each, beside a base that is cut."""
        return 1 if self.model.adapter is not None else self.layout.parts

    @property
    def state_bytes(self) -> int:
        """The state that all members hold."""
        return self.exchange.state_vectors * self.vector_bytes

    @property
    def tokens(self) -> int:
        """Tokens on one device at a time."""
        return self.sequences * self.seq_len

    @property
    def has_head(self) -> bool:
        return self.blocks.stop == self.model.layers


@dataclass(frozen=True)
class Footprint:
    """Bytes by item, where they lie; of several devices those of each. On a machine without a GPU the device's are the
    host's, too."""

    device: Mapping[str, float]
    host: Mapping[str, float]
    disk: Mapping[str, float]
    device_is_host: bool
    devices: int = 1

    @property
    def device_bytes(self) -> float:
        return sum(self.device.values())

    @property
    def host_bytes(self) -> float:
        """Of the machine's memory."""
        return sum(self.host.values()) + self.device_is_host * self.devices * self.device_bytes

    @property
    def disk_bytes(self) -> float:
        return sum(self.disk.values())
