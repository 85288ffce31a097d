"""The devices that the arithmetic of a worker is tested on: the CPU, and a GPU where there is one."""

from __future__ import annotations

from typing import Final

import torch

DEVICES: Final = ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)
