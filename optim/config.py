"""What a run's manifest says about agreeing on weights: the method with its settings, the codecs.

Plain msgspec structs without torch. A value that makes no sense raises ValueError that begins with the field's name
(msgspec turns it into a ValidationError with the field's path).
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

UpCodec = Literal[
    "fp32", "fp16", "bf16", "int8", "int8_6sigma", "int4", "nf4", "fp4_e3m0",
    "ternary", "sign", "topk", "powersgd", "lgreco",
]  # fmt: skip
DownCodec = Literal["fp32", "fp16", "bf16", "int8", "int8_6sigma", "int4", "nf4", "fp4_e3m0"]
STEPS_MAX: Final = 1_000_000
EAGER_PEERS: Final = 8  # from here on, with more momentum than below, it diverged (algorithms.md)
EAGER_MOMENTUM: Final = 0.5


class CodecConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How vectors cross the wire: `up` to a slice's owner, `down` merged from it to everybody. What an owner left out
    nobody could add to the next round's result, for owners change: `down` takes no codec that needs error feedback.

    `rank` is PowerSGD's, whose messages are passed on as they are: `down` is not used. `lgreco` gives every slice int8,
    int4 or ternary bits so that the whole makes no more error than `error_budget` times what int4 everywhere would
    make."""

    up: UpCodec = "int8"
    down: DownCodec = "int8"
    rank: int = 4
    error_budget: float = 1.0

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 1024:
            raise ValueError(f"rank is {self.rank}: it must lie between 1 and 1024")
        if not 0 < self.error_budget <= 100:
            raise ValueError(f"error_budget is {self.error_budget}: it must lie between 0 and 100")


class MethodConfig(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="method"):
    """What all methods have. `steps` is H: inner steps a round for the fastest peer; slower ones do fewer in the same
    time."""

    steps: int

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= STEPS_MAX:
            raise ValueError(f"steps is {self.steps}: a round has at least 1 inner step, and at most {STEPS_MAX}")

    def _within(self, name: str, low: float, high: float) -> None:
        value = getattr(self, name)
        if not low <= value <= high:
            raise ValueError(f"{name} is {value}: it must lie between {low} and {high}")


class PerStepConfig(MethodConfig, kw_only=True, frozen=True):
    """A method that exchanges gradients: `steps` batches a peer add up to one gradient."""

    steps: int = 1


class OuterStepConfig(MethodConfig, frozen=True, kw_only=True):
    """A method that ends a round with DiLoCo's outer step."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lr <= 10:
            raise ValueError(f"lr is {self.lr}: it must lie between 0 and 10")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}: it must lie in [0, 1)")


class DilocoConfig(OuterStepConfig, frozen=True, kw_only=True, tag="diloco"):
    """DiLoCo (arXiv 2311.08105). momentum 0, lr 1: FedAvg, Local SGD.

    `schedule` "quadratic" is the Quadratic Synchronization Rule (2310.14423): H = max(steps, (alpha / lr)^2) with the
    inner learning rate `lr` of the round's start, so that rounds grow as the rate falls; `steps_max` bounds it."""

    schedule: Literal["constant", "quadratic"] = "constant"
    alpha: float = 0.0
    steps_max: int = 1000

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.schedule == "quadratic") != (self.alpha > 0):
            raise ValueError('alpha goes with schedule = "quadratic": set both or neither')
        self._within("steps_max", 1, STEPS_MAX)


class StreamingConfig(OuterStepConfig, frozen=True, kw_only=True, tag="streaming"):
    """Streaming DiLoCo (2501.18512): `steps` is a full cycle, one of `fragments` is exchanged every steps / fragments
    inner steps; it is sent `tau` inner steps before it is taken in, while training goes on, and the local weights
    become mix * local + (1 - mix) * outer. The paper's mix is 0.5; on our small models 0 learns better (RESULTS.md)."""

    fragments: int = 2
    tau: int = 1
    mix: float = 0.0
    lr: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        self._within("mix", 0, 1)
        self._within("fragments", 1, 1024)
        if self.steps % self.fragments:
            raise ValueError(f"steps is {self.steps}: it must be a multiple of fragments ({self.fragments})")
        slot = self.steps // self.fragments
        if not 0 <= self.tau < slot:
            raise ValueError(f"tau is {self.tau}: it must be below steps / fragments ({slot})")


class EagerConfig(OuterStepConfig, frozen=True, kw_only=True, tag="eager"):
    """DiLoCo with eager updates (2502.12996): the exchange lasts a whole round, and a peer steps with its own fresh
    delta and the others' old ones. Unstable with many peers or much momentum."""

    lr: float = 0.3
    momentum: float = 0.5

    def caution(self, peers: int) -> str:
        """Why that many peers should not use it; empty if there is nothing to say."""
        if peers >= EAGER_PEERS and self.momentum > EAGER_MOMENTUM:
            return (
                f"eager updates are unstable with {peers} peers and momentum {self.momentum}: lower momentum to"
                f" {EAGER_MOMENTUM}, have fewer than {EAGER_PEERS} peers, or use streaming"
            )
        return ""


class DemoConfig(PerStepConfig, frozen=True, kw_only=True, tag="demo"):
    """Decoupled momentum (2411.19870): the inner learning rate steps; the inner optimizer's other settings are not
    used, but for its weight_decay, on all parameters."""

    decay: float = 0.999
    topk: int = 32
    chunk: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        self._within("decay", 0, 1)
        self._within("topk", 1, 65536)
        self._within("chunk", 2, 256)


class SparseLocoConfig(MethodConfig, frozen=True, kw_only=True, tag="sparseloco"):
    """SparseLoCo (2508.15706): `bins` levels a value (a power of 2; 0: fp32 values)."""

    lr: float = 0.4
    topk: int = 64
    chunk: int = 64
    bins: int = 4
    ef_decay: float = 0.95
    clip_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._within("lr", 0, 10)
        self._within("ef_decay", 0, 1)
        self._within("topk", 2, 65536)
        self._within("chunk", 2, 256)
        if self.bins and (self.bins < 2 or self.bins > 256 or self.bins & (self.bins - 1)):
            raise ValueError(f"bins is {self.bins}: it must be 0, or a power of 2 up to 256")


class LionConfig(PerStepConfig, frozen=True, kw_only=True, tag="lion"):
    """Distributed Lion (2404.00438): signs up, their majority or their mean down. Uses the inner lr and
    weight_decay, on all parameters."""

    b1: float = 0.9
    b2: float = 0.99
    vote: Literal["majority", "average"] = "majority"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._within("b1", 0, 1)
        self._within("b2", 0, 1)


class AllReduceConfig(PerStepConfig, frozen=True, kw_only=True, tag="allreduce"):
    """Synchronous large batches (DeDLOC, 2106.10207): all peers together go through `batch` sequences, then one step
    of `optimizer` with the inner section's lr, betas, eps, weight_decay (of matrices) and clip_norm is made
    everywhere."""

    batch: int
    optimizer: Literal["adamw", "lamb"] = "adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._within("batch", 1, STEPS_MAX)


class GossipConfig(MethodConfig, frozen=True, kw_only=True, tag="gossip"):
    """NoLoCo (2506.10911): after `steps` inner steps a peer merges with one other, chosen at random; no common round,
    no common state. The paper's names: alpha is momentum, beta the learning rate, gamma the pull together."""

    alpha: float = 0.5
    beta: float = 0.7
    gamma: float = 0.6

    def __post_init__(self) -> None:
        super().__post_init__()
        self._within("alpha", 0, 1)
        self._within("beta", 0, 10)
        self._within("gamma", 0, 2)


OuterConfig = (
    DilocoConfig
    | StreamingConfig
    | EagerConfig
    | DemoConfig
    | SparseLocoConfig
    | LionConfig
    | AllReduceConfig
    | GossipConfig
)
METHODS: Final = {
    "diloco": DilocoConfig, "streaming": StreamingConfig, "eager": EagerConfig, "demo": DemoConfig,
    "sparseloco": SparseLocoConfig, "lion": LionConfig, "allreduce": AllReduceConfig, "gossip": GossipConfig,
}  # fmt: skip
DENSE: Final = (DilocoConfig, StreamingConfig, EagerConfig, AllReduceConfig, GossipConfig)
"""Methods whose messages are vectors, which any codec carries; the others pack their own."""
