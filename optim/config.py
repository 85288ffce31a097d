"""The manifest's sections about agreeing on weights: the method with its settings, and the codecs.

Plain msgspec structs without torch. An impossible value raises ValueError whose text begins with the field's name;
msgspec turns it into a ValidationError with the field's path.
"""

from __future__ import annotations

from typing import Any, ClassVar, Final, Literal

import msgspec

from peer.config import check_range

UpCodec = Literal[
    "fp32", "fp16", "bf16", "int8", "int8_6sigma", "int4", "nf4", "fp4_e3m0", "two_bit",
    "ternary", "sign", "topk", "powersgd", "lgreco",
]  # fmt: skip
DownCodec = Literal["fp32", "fp16", "bf16", "int8", "int8_6sigma", "int4", "nf4", "fp4_e3m0", "two_bit"]
MergeName = Literal["mean", "trimmed_mean", "median", "flag"]
STEPS_MAX: Final = 1_000_000
ALPHA_MAX: Final = 1e6
EAGER_PEERS: Final = 8  # with so many peers and more momentum than below, training diverged
EAGER_MOMENTUM: Final = 0.5
TRIM: Final = 0.25
BITS_MIN: Final = 1.25  # signs and their scales take a little more than 1
BITS_MAX: Final = 8.0
FLAG_PEERS_MAX: Final = 64  # the eigenvectors of 64 contributors take about a second; of 1,024 they would take an hour


class CodecConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The codecs of vectors on the wire."""

    up: UpCodec = "int8"
    """From a contributor to a slice's owner."""
    down: DownCodec = "int8"
    """From the owner, merged, to all members. A slice's owner changes from round to round and cannot add to the next
    result what this one left out: of the codecs that need error feedback only `two_bit` is allowed, whose results stay
    close to the merge."""
    rank: int = 4
    """Of `powersgd`."""
    bits: float = 3.0
    """Of `lgreco`: a message's, a value. Each sender chooses int8, int4, two_bit or sign for each part of a layer."""

    def __post_init__(self) -> None:
        if not 1 <= self.rank <= 1024:
            raise ValueError(f"rank is {self.rank}: set it between 1 and 1024")
        if not BITS_MIN <= self.bits <= BITS_MAX:
            raise ValueError(f"bits is {self.bits}: set it between {BITS_MIN} and {BITS_MAX}")


class MethodConfig(msgspec.Struct, frozen=True, kw_only=True, tag_field="method"):
    """The settings that all methods have."""

    has_common_state: ClassVar[bool] = True
    """Whether the peers agree on one state, round by round; else each has weights of its own."""

    steps: int = 100
    """H: the fastest peer's inner steps in a round; slower peers make fewer in the same time."""

    def __post_init__(self) -> None:
        if not 1 <= self.steps <= STEPS_MAX:
            raise ValueError(f"steps is {self.steps}: set a number of inner steps between 1 and {STEPS_MAX}")


class PerStepConfig(MethodConfig, kw_only=True, frozen=True):
    """A method that exchanges gradients; a peer's gradient is the mean over `steps` batches."""

    steps: int = 1


class OuterStepConfig(MethodConfig, frozen=True, kw_only=True):
    """A method that ends a round with DiLoCo's outer step."""

    lr: float = 0.7
    momentum: float = 0.9
    nesterov: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.lr <= 10:
            raise ValueError(f"lr is {self.lr}: set it above 0 and at most 10")
        if not 0 <= self.momentum < 1:
            raise ValueError(f"momentum is {self.momentum}: set it in [0, 1)")


class MergedStepConfig(OuterStepConfig, frozen=True, kw_only=True):
    """A method whose slices an owner may merge by another rule than the mean (`optim.rules`)."""

    merge: MergeName = "mean"
    """"mean" is weighted by tokens. "trimmed_mean" and "median" count contributors alike, each coordinate for itself
    (1803.01498). "flag" projects the mean on the direction that most contributions share (2302.05865)."""
    trim: float = TRIM
    """Of "trimmed_mean": the share of the contributors whose values are left out at each side. With fewer than 1 / trim
    contributors none is left out."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0.01 <= self.trim < 0.5:
            raise ValueError(f"trim is {self.trim}: set it to at least 0.01 and below 0.5")
        if self.trim != TRIM and self.merge != "trimmed_mean":
            raise ValueError(
                f'trim is {self.trim} with merge "{self.merge}": set merge = "trimmed_mean" or leave it out'
            )


class DilocoConfig(MergedStepConfig, frozen=True, kw_only=True, tag="diloco"):
    """DiLoCo (arXiv 2311.08105). With momentum 0 and lr 1 the peers' weights are averaged, as in federated averaging,
    but after steps of the inner optimizer instead of SGD."""

    schedule: Literal["constant", "quadratic"] = "constant"
    """The rule "quadratic" is the Quadratic Synchronization Rule (2310.14423): H = max(steps, (alpha / lr)^2), with the
    inner learning rate at the round's start. Rounds grow as the rate falls."""
    alpha: float = 0.0
    steps_max: int = 1000
    """The bound of the quadratic rule's H."""
    check_by_loss: float = 0.0
    """The share of the rounds after which a member checks another's update by the held-out loss, and leaves out, where
    it leads, what clearly makes it worse. 0: never. Only where each peer holds the whole model."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 0, ALPHA_MAX, "alpha")
        if (self.schedule == "quadratic") != (self.alpha > 0):
            raise ValueError(
                f'alpha is {self.alpha} with schedule "{self.schedule}":'
                ' set alpha above 0 with schedule = "quadratic", else leave it out'
            )
        check_range(self, 1, STEPS_MAX, "steps_max")
        check_range(self, 0, 1, "check_by_loss")


class StreamingConfig(MergedStepConfig, frozen=True, kw_only=True, tag="streaming"):
    """Streaming DiLoCo (2501.18512). `steps` is a full cycle over all fragments."""

    fragments: int = 2
    """One of these is exchanged every steps / fragments inner steps."""
    tau: int = 1
    """Inner steps between sending a fragment and using its result; training continues meanwhile."""
    mix: float = 0.0
    """With a result, local <- mix * local + (1 - mix) * outer. The paper's value is 0.5; small models learn better with
    0 (RESULTS.md)."""
    lr: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 0, 1, "mix")
        check_range(self, 1, 1024, "fragments")
        if self.steps % self.fragments:
            raise ValueError(f"steps is {self.steps}: set it to a multiple of fragments ({self.fragments})")
        slot = self.steps // self.fragments
        if not 0 <= self.tau < slot:
            raise ValueError(f"tau is {self.tau}: set it below steps / fragments ({slot})")


class EagerConfig(OuterStepConfig, frozen=True, kw_only=True, tag="eager"):
    """DiLoCo with eager updates (2502.12996): an exchange lasts a whole round, and a peer steps with its own fresh
    delta and the others' deltas of the round before. Unstable with many peers or much momentum."""

    lr: float = 0.3
    momentum: float = 0.5

    def caution(self, peers: int) -> str:
        """Return a warning for this many peers, or an empty string."""
        if peers >= EAGER_PEERS and self.momentum > EAGER_MOMENTUM:
            return (
                f"eager updates are unstable with {peers} peers and momentum {self.momentum}: lower momentum to"
                f" {EAGER_MOMENTUM}, have fewer than {EAGER_PEERS} peers, or use streaming"
            )
        return ""


class DemoConfig(PerStepConfig, frozen=True, kw_only=True, tag="demo"):
    """DeMo, decoupled momentum (2411.19870). Of the inner section only the learning rate and weight_decay count;
    weight_decay applies to all parameters."""

    decay: float = 0.999
    topk: int = 32
    chunk: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 0, 1, "decay")
        check_range(self, 1, 65536, "topk")
        check_range(self, 2, 256, "chunk")


class SparseLocoConfig(MethodConfig, frozen=True, kw_only=True, tag="sparseloco"):
    """SparseLoCo (2508.15706)."""

    steps: int = 30
    lr: float = 0.4
    topk: int = 64
    chunk: int = 64
    bins: int = 4
    """Levels of a value: a power of 2; 0 sends fp32 values."""
    ef_decay: float = 0.95
    clip_norm: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 0, 10, "lr")
        check_range(self, 0, 1, "ef_decay")
        check_range(self, 2, 65536, "topk")
        check_range(self, 2, 256, "chunk")
        if self.bins and (self.bins < 2 or self.bins > 256 or self.bins & (self.bins - 1)):
            raise ValueError(f"bins is {self.bins}: set it to 0 or a power of 2 up to 256")


class LionConfig(PerStepConfig, frozen=True, kw_only=True, tag="lion"):
    """Distributed Lion (2404.00438): votes up, a bit each, their majority or mean down. Of the inner section only the
    learning rate and weight_decay count; weight_decay applies to all parameters."""

    b1: float = 0.9
    b2: float = 0.99
    vote: Literal["majority", "average"] = "majority"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 0, 1, "b1")
        check_range(self, 0, 1, "b2")


class AllReduceConfig(PerStepConfig, frozen=True, kw_only=True, tag="allreduce"):
    """Synchronous large batches (DeDLOC, 2106.10207). All peers make the same step of `optimizer`, with the inner
    section's lr, betas, eps, weight_decay (of matrices) and clip_norm."""

    batch: int
    """Sequences of all peers together before a step."""
    optimizer: Literal["adamw", "lamb"] = "adamw"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 1, STEPS_MAX, "batch")


class GossipConfig(MethodConfig, frozen=True, kw_only=True, tag="gossip"):
    """NoLoCo (2506.10911): after `steps` inner steps a peer merges with one other, chosen at random. There is no common
    round and no common state."""

    has_common_state: ClassVar[bool] = False

    steps: int = 50
    alpha: float = 0.5
    """Momentum."""
    beta: float = 0.7
    """Learning rate."""
    gamma: float = 0.6
    """Strength of the pull towards the partner's weights."""

    def __post_init__(self) -> None:
        super().__post_init__()
        check_range(self, 0, 1, "alpha")
        check_range(self, 0, 10, "beta")
        check_range(self, 0, 2, "gamma")


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
METHODS: Final[dict[str, type[Any]]] = {
    "diloco": DilocoConfig, "streaming": StreamingConfig, "eager": EagerConfig, "demo": DemoConfig,
    "sparseloco": SparseLocoConfig, "lion": LionConfig, "allreduce": AllReduceConfig, "gossip": GossipConfig,
}  # fmt: skip
DENSE: Final = (DilocoConfig, StreamingConfig, EagerConfig, AllReduceConfig, GossipConfig)
"""Methods whose messages are vectors, which any codec carries. The other methods pack their own messages."""
ONE_MESSAGE: Final = ("fp32", "fp16", "bf16", "int8", "int8_6sigma", "int4", "nf4", "fp4_e3m0")
"""Up codecs whose single message is close to the update. Of the others a message is largely zeros or noise, and only
the sum over peers and rounds is right: trimming would cut off what they are about to repay."""
MEAN_ONLY: Final = {
    "eager": "its peers step with their own update beforehand, at the weight that it has in a mean",
    "demo": "a coefficient is averaged over the few peers that chose it",
    "sparseloco": "a value is averaged over the few peers that chose it",
    "lion": 'its votes are merged by `vote`: "majority" already is a median of signs',
    "allreduce": "its gradient is that of the whole batch, the exact mean of all samples",
    "gossip": "it merges two peers, and of two it is unknown which one is wrong",
}
"""Methods without a choice of `merge`, and why."""


def check_merge(method: OuterConfig, codec: CodecConfig, max_peers: int = FLAG_PEERS_MAX) -> None:
    """Raise ValueError, beginning with the field's name, unless merge rule and check by loss suit the codec and the
    run's size."""
    if isinstance(method, DilocoConfig) and method.check_by_loss and codec.up not in ONE_MESSAGE:
        raise ValueError(
            f"check_by_loss is {method.check_by_loss}: with the codec {codec.up} one message alone says little; set"
            f" [codec] up to one of {', '.join(ONE_MESSAGE)}, or leave it out"
        )
    if not isinstance(method, MergedStepConfig) or method.merge == "mean":
        return
    if codec.up not in ONE_MESSAGE:
        raise ValueError(
            f"merge is {method.merge!r}: with the codec {codec.up} only the sum of many messages is right; set merge ="
            f' "mean", or [codec] up to one of {", ".join(ONE_MESSAGE)}'
        )
    if method.merge == "flag" and max_peers > FLAG_PEERS_MAX:
        raise ValueError(
            f"merge is 'flag' with {max_peers} peers: lower [run] max_peers to {FLAG_PEERS_MAX}, or set merge ="
            ' "median"'
        )


def check_momentum(method: OuterConfig, codec: CodecConfig) -> None:
    """Raise ValueError, beginning with the field's name, if a new run would diverge: with `powersgd` most of an update
    arrives rounds late by error feedback, and the outer momentum multiplies it (benchmarks/training/convergence.py)."""
    if codec.up == "powersgd" and isinstance(method, OuterStepConfig) and method.momentum:
        raise ValueError(
            f"momentum is {method.momentum}: with the codec powersgd updates arrive late, and momentum makes training"
            " diverge; set momentum = 0 and lr = 1, or another [codec] up"
        )
