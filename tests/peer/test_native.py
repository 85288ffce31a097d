"""Whether compiled kernels are found."""

from __future__ import annotations

import subprocess
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path

import pytest

from optim.kernels import codec_kernels
from peer.native import SWITCH, open_library

PLACE = Path(codec_kernels.__file__).parent


def test_a_built_library_is_opened_and_the_switch_forbids_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    library = open_library(PLACE, "_codecs")
    assert library is not None and library.int8_encode
    monkeypatch.setenv(SWITCH, "1")
    assert open_library(PLACE, "_codecs") is not None
    monkeypatch.setenv(SWITCH, "0")
    assert open_library(PLACE, "_codecs") is None


def test_one_that_is_missing_or_of_another_system_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(SWITCH, raising=False)
    assert open_library(tmp_path, "_codecs") is None
    (tmp_path / f"_codecs{EXTENSION_SUFFIXES[0]}").write_bytes(b"MZ")
    assert open_library(tmp_path, "_codecs") is None


def test_a_library_without_our_functions_counts_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import ctypes

    monkeypatch.setattr(codec_kernels, "open_library", lambda folder, name: ctypes.CDLL(None))
    assert codec_kernels._load() == {}


def test_the_switch_reaches_a_process() -> None:
    program = "from optim.kernels.codec_kernels import KERNELS; print(sorted(KERNELS))"
    done = subprocess.run(
        [sys.executable, "-c", program], env={SWITCH: "0"}, cwd=PLACE.parents[1], capture_output=True, text=True
    )
    assert done.stdout == "[]\n", done.stderr
    assert sorted(codec_kernels.KERNELS) == ["bf16", "fp16", "fp32", "int4", "int8", "two_bit"], "without the switch"
