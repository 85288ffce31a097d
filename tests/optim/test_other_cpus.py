"""The same messages make the same next state, bit for bit, on CPUs with other instruction sets, more threads
and without compiled kernels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.optim.kernels.torch_only import torch_only
from tests.optim.support.shared_half import RUNS, next_state, write

OTHERS = {
    "no vectors": {
        "ATEN_CPU_CAPABILITY": "default",
        "MKL_ENABLE_INSTRUCTIONS": "SSE4_2",
        "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3",
    },
    "avx2, two threads": {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "OMP_NUM_THREADS": "2"},
}


def hashes(folder: Path, env: dict[str, str]) -> list[str]:
    root = Path(__file__).parents[2]
    command = [sys.executable, "-m", "tests.optim.support.shared_half", str(folder)]
    plain = {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(root)}
    done = subprocess.run(command, env={**os.environ, **plain, **env}, cwd=root, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def hashes_here(folder: Path) -> list[str]:
    return [f"{run}: {next_state(run, folder)}" for run in RUNS]


@pytest.mark.process
def test_every_method_computes_the_same_bits_on_other_cpus(tmp_path: Path) -> None:
    write(tmp_path)
    here = hashes_here(tmp_path)
    assert len(here) == len(RUNS) == len(set(here))
    for name, env in OTHERS.items():
        assert hashes(tmp_path, env) == here, name
    with torch_only():
        assert hashes_here(tmp_path) == here, "without our kernels"
