"""Parameters in safetensors files, one at a time: the files are mapped, and only what is asked for is read."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peer.errors import CheckpointError
from peer.footprint.parameters import EMBEDDING, HEAD
from peer.model.parameter_names import canonical_names
from peer.model.weight_files import check_count, check_header, held_twice, listed_files, unreadable


class ParameterFiles:
    """The parameters in the weight files of some folders, by canonical name; the first folder that has one counts. A
    model without a head of its own has its embedding for one. A folder without a checkpoint's files counts with all
    its .safetensors files."""

    def __init__(self, folders: Iterable[Path]) -> None:
        """Read the headers. Raises CheckpointError for a file that is no safetensors file, and for two names in one
        folder that are one parameter."""
        self._folders = list(folders)
        self._files: dict[Path, Any] = {}
        self._places: dict[str, tuple[Path, str]] = {}  # the file of a parameter, and its name there
        for folder in self._folders:
            paths = listed_files(folder) or sorted(folder.glob("*.safetensors"))
            held: dict[str, Path] = {}
            for path in filter(Path.is_file, paths):  # a copy may be of some shards only
                for name in self._opened(path).keys():  # noqa: SIM118  not a dict
                    if name in held:
                        raise held_twice(path, name, held[name])
                    held[name] = path
                check_count(path, len(held))
            for canonical, name in canonical_names(folder, held).items():
                self._places.setdefault(canonical, (held[name], name))

    @property
    def names(self) -> frozenset[str]:
        """The parameters in these files."""
        return frozenset(self._places) | ({HEAD} if EMBEDDING in self._places else frozenset())

    @property
    def has_head(self) -> bool:
        """Whether a file has a head, beside the embedding."""
        return HEAD in self._places

    def tensor(self, name: str) -> Tensor:
        """Return a parameter, mapped. Raises CheckpointError if no file has it."""
        place = self._places.get(EMBEDDING if name == HEAD and not self.has_head else name)
        if place is None:
            folders = ", ".join(map(str, self._folders))
            raise CheckpointError(f"no file in {folders} has {name}: name a folder with all files of the checkpoint")
        path, found = place
        try:
            tensor: Tensor = self._opened(path).get_tensor(found)
        except (OSError, SafetensorError) as error:
            raise unreadable(path, error) from error
        return tensor

    def _opened(self, path: Path) -> Any:
        if path not in self._files:
            try:
                check_header(path)
                self._files[path] = safe_open(path, framework="pt")
            except (OSError, SafetensorError) as error:
                raise unreadable(path, error) from error
        return self._files[path]


def check_finite(folder: Path, name: str, tensor: Tensor) -> None:
    """Raise CheckpointError if a value is not finite in fp32."""
    if not bool(torch.isfinite(tensor.float()).all()):
        raise CheckpointError(
            f"{name} in {folder} holds NaN or infinity: take an earlier checkpoint, from before the weights diverged"
        )
