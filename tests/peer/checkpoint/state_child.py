"""Child of test_inner_state: saves a state twice in each of the FOLDERS, and is killed there at the moment it names."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

import torch

from tests.peer.checkpoint.test_inner_state import SIZE, Told, filled, state_file


def save(folder: Path, ready: int) -> None:
    """Save, and wait for the end where the folder's name says so."""

    def killed_here() -> None:
        os.write(ready, b".")
        threading.Event().wait()

    def half(out: torch.Tensor) -> None:
        out[: SIZE // 2].fill_(2)
        killed_here()

    def replaced(*paths: str) -> None:
        if folder.name == "renamed":
            replace(*paths)
        killed_here()

    file, replace = state_file(folder, Told()), os.replace
    file.save_small(filled(1))
    if folder.name == "filled by half":
        file.save_small(half)
    os.replace = replaced  # type: ignore[assignment]
    file.save_small(filled(2))


def main() -> None:
    for folder in map(Path, sys.argv[1:]):
        wait, ready = os.pipe()
        if not (pid := os.fork()):
            save(folder, ready)
        os.read(wait, 1)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


if __name__ == "__main__":
    main()
