"""Computing devices of one machine, and how they share a model."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import msgspec

from peer.config import ComputeType, InnerConfig, MasterType, ModelConfig, StorageConfig
from peer.errors import ConfigError
from peer.footprint.optimizer_state import BLOCK, SMALL
from peer.footprint.parameters import parameter_shapes

_FIELDS: Final = {"ddp": "replicate", "fsdp": "shard", "tp": "tensor"}
_RANKS_MAX: Final = 64
SPLIT_OPTIMIZERS: Final = ("adamw", "adamw8bit")
"""Those that can move a part of a parameter's values by itself, and are made to do so."""
_USE: Final = "use auto, ddp, fsdp, tp, or sizes such as fsdp:2,tp:2"


def parse_devices(text: str) -> tuple[str, ...]:
    """Return the devices that `0,1` (GPUs by number) or `cpu:2` name, one for each rank. Raises ConfigError."""
    kind, colon, count = text.partition(":")
    if kind == "cpu":
        ranks = int(count) if count.isdecimal() and len(count) < 4 else 1 - bool(colon)
        names = ["cpu"] * ranks
    else:
        numbers = [part.strip().removeprefix("cuda:") for part in text.split(",")]
        names = [f"cuda:{int(number)}" for number in numbers if number.isdecimal() and len(number) < 4]
        if len(set(names)) < len(numbers):
            names = []
    if not 1 <= len(names) <= _RANKS_MAX:
        raise ConfigError(
            f"the devices {text!r} are not understood: name GPUs by their numbers, each once, such as 0,1, or a number"
            f" of processes on the CPU, such as cpu:2, {_RANKS_MAX} at most"
        )
    return tuple(names)


class Compute(msgspec.Struct, frozen=True):
    """The user's choices of what computes on one machine."""

    device: str = "auto"
    """The first of `devices`, or the one."""
    devices: tuple[str, ...] = ()
    """Where there are several."""
    layout: str = "auto"
    """How several devices share the model, as `Layout.parse` takes it."""
    threads: int | None = None
    """Of all devices' processes together; None: as many as the cores that this process may use."""
    compile: bool = False
    """Whether to use torch.compile, which runs a compiler on this machine."""
    memory_bytes: float | None = None
    """How much of the device's memory may be taken, on a CPU of the machine's; None for what is free."""
    host_memory_bytes: float | None = None
    """Beside a GPU: how much of the machine's memory may be taken."""
    dtype: ComputeType | None = None
    """In place of the run's `[inner] dtype`, which changes no message."""
    weights: MasterType = "fp32"
    """How the device holds the weights, which changes no message either."""

    @property
    def all_devices(self) -> tuple[str, ...]:
        return self.devices or (self.device,)

    @property
    def threads_each(self) -> int | None:
        """The threads of each device's process; None: an equal share of the cores."""
        return self.threads and max(1, self.threads // len(self.all_devices))

    def applied_to(self, inner: InnerConfig) -> InnerConfig:
        """Return a run's settings as this machine computes."""
        return inner if self.dtype is None else msgspec.structs.replace(inner, dtype=self.dtype)

    def device_of(self, rank: int) -> str:
        """Return the device of one of several processes."""
        return self.devices[rank] if self.devices else self.device


@dataclass(frozen=True)
class Layout:
    """`replicate` copies of the model (DDP). Within one, `shard` ranks hold a part of each parameter (FSDP), and each
    of these parts is cut again in `tensor` (TP). Neighbouring ranks are those of one tensor group."""

    shard: int = 1
    tensor: int = 1
    replicate: int = 1

    @classmethod
    def parse(cls, text: str, devices: int, fits: Callable[[Layout], bool]) -> Layout:
        """Return what `text` asks for: one name for all devices, or `name:size` for each; one size may be left out.
        "auto" is ddp if a whole model `fits` each device, else fsdp. Raises ConfigError."""
        if text == "auto":
            copies = cls(replicate=devices)
            return copies if fits(copies) else cls(shard=devices)
        sizes: dict[str, int | None] = {}
        for part in text.split(","):
            name, _, size = part.strip().partition(":")
            if (
                name not in _FIELDS
                or name in sizes
                or (":" in part and not (size.isdecimal() and len(size) < 4 and int(size) > 0))
            ):
                raise ConfigError(f"the layout {text!r} is not understood at {part!r}: {_USE}")
            sizes[name] = int(size) if size else None
        given = math.prod(size for size in sizes.values() if size is not None)
        open_names = [name for name, size in sizes.items() if size is None]
        if len(open_names) > 1:
            raise ConfigError(f"the layout {text!r} leaves the sizes of {' and '.join(open_names)} open: give one more")
        if devices % given or (not open_names and given != devices):
            raise ConfigError(
                f"the layout {text!r} is for {given} ranks and there are {devices} devices: make the product of its"
                " sizes equal to the number of --devices"
            )
        return cls(**{_FIELDS[name]: devices // given if size is None else size for name, size in sizes.items()})

    @property
    def parts(self) -> int:
        """The ranks of one copy of the model."""
        return self.shard * self.tensor

    @property
    def size(self) -> int:
        """The number of ranks."""
        return self.replicate * self.parts

    @property
    def batches(self) -> int:
        """The number of ranks that have sequences of their own."""
        return self.replicate * self.shard

    def check(self, model: ModelConfig, optimizer: str, seq_len: int, base: StorageConfig | None = None) -> None:
        """Raise ConfigError where the model, or its optimizer, cannot be cut like this. `base`: the form of the frozen
        weights of a model with an adapter. These alone are cut, so any optimizer will do."""
        cut = {
            "model.heads": model.heads,
            "model.kv_heads": model.kv_heads,
            "model.intermediate_size": model.intermediate_size,
            "model.vocab_size": model.vocab_size,
            "data.seq_len": seq_len,
        }
        for name, value in cut.items():
            if value % self.tensor:
                raise ConfigError(
                    f"{name} is {value}, which tp:{self.tensor} does not divide: use fsdp or a smaller tp"
                )
        if model.adapter is not None:
            self._check_base(base)
            return
        if self.parts > 1 and optimizer in ("lamb", "muon"):
            raise ConfigError(f"{optimizer} needs whole matrices, and {self} cuts them: use adamw, or the layout ddp")
        if self.parts > 1 and optimizer == "adamw8bit":
            self._check_blocks(model)

    def _check_base(self, base: StorageConfig | None) -> None:
        """Raise ConfigError where the frozen weights beside an adapter cannot be cut like this."""
        if self.tensor > 1:
            raise ConfigError("tp does not cut the base of an adapter: use fsdp or ddp")
        if self.shard > 1 and base is not None and base.quantization is not None:
            raise ConfigError(f"a base in {base.quantization} is not cut, and {self} cuts it: use the layout ddp")

    def _check_blocks(self, model: ModelConfig) -> None:
        """Raise ConfigError where a cut could go through a block of adamw8bit's values, which have one scale."""
        for name, shape in parameter_shapes(model):
            # rows are cut anywhere, columns by TP alone; a vector by both, and its exports by all
            block = BLOCK * (self.size if len(shape) == 1 else self.tensor)
            if math.prod(shape) >= SMALL and shape[-1] % block:
                raise ConfigError(
                    f"adamw8bit has a scale for {BLOCK} values, and {self} would cut {name}, {shape[-1]} wide, within"
                    f" them: use adamw, the layout ddp, or a width that {block} divides"
                )

    def check_stage(self, is_adapted: bool = False) -> None:
        """Raise ConfigError where a stage of a pipeline cannot be cut like this. `is_adapted`: whether an adapter is
        trained beside its base."""
        if self.shard > 1 and is_adapted:
            raise ConfigError("fsdp does not cut the base of an adapter in a pipeline: use ddp")
        if self.tensor > 1:
            raise ConfigError("tp shares whole models only, and this one is cut into stages: use ddp or fsdp")

    def __str__(self) -> str:
        sizes = [f"{name}:{getattr(self, field)}" for name, field in _FIELDS.items() if getattr(self, field) > 1]
        return ",".join(sizes) or "one device"


ONE_DEVICE: Final = Layout()


def check_split(
    layout: Layout, model: ModelConfig, optimizer: str, is_fp16: bool = False, is_stage: bool = False
) -> None:
    """Raise ConfigError where the weights of a model cannot be held split (`Compute.weights`)."""
    if layout.size > 1:
        raise ConfigError(f"--weights split is for one device, and there are {layout.size}: use --weights fp32")
    if is_stage:
        raise ConfigError("--weights split is for whole models, and this one is cut into stages: use --weights fp32")
    if model.adapter is not None:
        raise ConfigError("--weights split is for whole models, and this run trains an adapter: use --weights fp32")
    if optimizer not in SPLIT_OPTIMIZERS:
        raise ConfigError(
            f"--weights split works with {' and '.join(SPLIT_OPTIMIZERS)}, and the run's optimizer is {optimizer}: use"
            " --weights fp32"
        )
    if is_fp16:
        raise ConfigError(
            "--weights split holds bf16, and this device computes in fp16, which needs copies of it: use --weights"
            " fp32, or --dtype bf16 or fp32"
        )
