"""A process that confines itself as a worker does, and writes what is in force to a file in the one folder that it may
write: `python -m peer.confinement.probe FOLDER`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import msgspec

from peer.confinement.confine import confine
from peer.confinement.grants import Grants

REPORT: Final = "confinement.json"

if __name__ == "__main__":
    restrictions = confine(Grants(private=sys.argv[1]))
    Path(sys.argv[1], REPORT).write_bytes(msgspec.json.encode(restrictions))
