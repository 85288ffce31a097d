"""A process that confines itself as a worker does, and prints what is in force: `python -m peer.confinement.probe`."""

from __future__ import annotations

import sys

import msgspec

from peer.confinement.confine import confine
from peer.confinement.grants import Grants

if __name__ == "__main__":
    sys.stdout.buffer.write(msgspec.json.encode(confine(Grants(private=sys.argv[1]))))
