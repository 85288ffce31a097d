"""Parameters in safetensors files, one at a time: the files are mapped, and only what is asked for is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peer.decoding import told
from peer.errors import CheckpointError

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"


class ParameterFiles:
    """The parameters in all .safetensors files of some folders, by name; the first folder that has one counts. A model
    without a head of its own has its embedding for one."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Read the headers. Raises CheckpointError for a file that is no safetensors file."""
        self._files: dict[Path, Any] = {}
        self._paths: dict[str, Path] = {}
        for folder in folders:
            whole = folder / "model.safetensors"  # then shards beside it are those of another download
            for path in [whole] if whole.is_file() else sorted(folder.glob("*.safetensors")):
                for name in self._opened(path).keys():  # noqa: SIM118  not a dict
                    self._paths.setdefault(name, path)

    @property
    def names(self) -> frozenset[str]:
        """The parameters that are here."""
        return frozenset(self._paths) | ({HEAD} if EMBEDDING in self._paths else frozenset())

    def tensor(self, name: str) -> Tensor:
        """Return a parameter, mapped. Raises CheckpointError if no file has it."""
        found = EMBEDDING if name == HEAD and name not in self._paths else name
        path = self._paths.get(found)
        if path is None:
            raise CheckpointError(f"no file has {name}: fetch the checkpoint again, all its files included")
        try:
            tensor: Tensor = self._opened(path).get_tensor(found)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{name} in {path} cannot be read ({told(error)}): fetch it again") from error
        return tensor

    def _opened(self, path: Path) -> Any:
        if path not in self._files:
            try:
                self._files[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read ({told(error)}): fetch it again") from error
        return self._files[path]


def check_finite(folder: Path, name: str, tensor: Tensor) -> None:
    """Raise CheckpointError if a value is not finite in fp32."""
    if not bool(torch.isfinite(tensor.float()).all()):
        raise CheckpointError(
            f"{name} in {folder} holds NaN or infinity: take an earlier checkpoint, from before the weights diverged"
        )
