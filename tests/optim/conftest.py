"""One torch thread: the vectors here are small, and the machine is shared."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
