"""Decoding in several threads at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

FIRST_DECODED_BY_FOUR = """
import sys, threading, types
import msgspec
from peer.decoding import decoder_of

SOURCE = '''
from __future__ import annotations
from typing import Annotated
import msgspec

class Part(msgspec.Struct, frozen=True):
    a: Annotated[int, msgspec.Meta(ge=0)]
    b: dict[str, int]

class Whole(msgspec.Struct, frozen=True):
    x: Part
    y: tuple[Part, ...]
    z: Annotated[bytes, msgspec.Meta(max_length=9)]
'''
DATA = msgspec.msgpack.encode({"x": {"a": 1, "b": {}}, "y": [], "z": b""})
sys.setswitchinterval(1e-6)
for number in range(200):
    module = sys.modules[f"m{number}"] = types.ModuleType(f"m{number}")
    exec(SOURCE, module.__dict__)
    ready = threading.Barrier(4)

    def decode():
        ready.wait()
        decoder_of(module.Whole).decode(DATA)

    threads = [threading.Thread(target=decode) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@pytest.mark.process
def test_a_type_is_first_decoded_in_several_threads() -> None:
    """With `msgspec.msgpack.decode(DATA, type=...)` this process ends with SIGSEGV."""
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", FIRST_DECODED_BY_FOUR], cwd=root, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
