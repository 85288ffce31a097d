"""The device that this machine computes on, and its features worth using."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from typing import Final

import torch

from peer.config import InnerConfig
from peer.errors import ConfigError

_NARROW: Final = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Device:
    """A resolved device. `bf16`: autocast to bf16 is faster there; `fp16`: to fp16 is, and to bf16 is not. `compile`:
    torch.compile is wanted and can run."""

    torch: torch.device
    bf16: bool
    compile: bool
    name: str
    memory_bytes: int = 0
    """Of a GPU; 0: that of the machine."""
    fp16: bool = False


def resolve_device(spec: str, compiles: bool = False) -> Device:
    """Resolve `auto`, `cpu`, `cuda`, `cuda:N` or `mps`; with `compiles` use torch.compile where it can run. Raises
    ConfigError if the machine has no such device."""
    if spec == "auto":
        spec = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        device = torch.device(spec)
    except RuntimeError as error:
        raise ConfigError(f"device {spec!r} is unknown: use auto, cpu, cuda, cuda:N or mps") from error
    if device.type == "cuda":
        if not torch.cuda.is_available() or (device.index or 0) >= torch.cuda.device_count():
            raise ConfigError(f"device {spec!r} is not on this machine: use auto or cpu")
        device = torch.device("cuda", device.index or 0)  # some of torch's functions want the number
        properties = torch.cuda.get_device_properties(device)
        modern = properties.major >= 8  # Volta and Turing emulate bf16; older ones have no units for fp16 either
        compiles, memory = compiles and properties.major >= 7, properties.total_memory  # Triton's support ends there
        return Device(
            device,
            bf16=modern,
            compile=compiles,
            name=properties.name,
            memory_bytes=memory,
            fp16=properties.major == 7,
        )
    if device.type == "mps":
        if not torch.backends.mps.is_available():
            raise ConfigError(f"device {spec!r} is not on this machine: use auto or cpu")
        return Device(device, bf16=False, compile=False, name="Apple GPU")
    if device.type != "cpu":
        raise ConfigError(f"device {spec!r} is not supported: use auto, cpu, cuda, cuda:N or mps")
    has_compiler = any(shutil.which(compiler) for compiler in ("g++", "clang++", os.environ.get("CXX", "c++")))
    return Device(device, bf16=_cpu_has_bf16_units(), compile=compiles and has_compiler, name="CPU")


def narrow_type(device: Device, config: InnerConfig) -> torch.dtype | None:
    """Return the type of 16 bits that the forward pass autocasts to: as configured, else what the device gains from.
    None: it computes in fp32."""
    if config.dtype == "auto":
        return torch.bfloat16 if device.bf16 else torch.float16 if device.fp16 else None
    return _NARROW[config.dtype]


def _cpu_has_bf16_units() -> bool:
    """Whether the CPU has AMX; without it bf16 products are slower than fp32."""
    probe = getattr(torch.cpu, "_is_amx_tile_supported", None)
    return bool(probe is not None and probe())
