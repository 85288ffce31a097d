"""`peer` in a process that looks at its home's disk all the time, and tells at its end what was there at each moment.

    python -m tests.support.disk.watched_peer join ... --home HOME

writes HOME.moments: a pickled list of `tests.support.disk.shadow_disk.Moment`.
"""

from __future__ import annotations

import pickle
import sys
from pathlib import Path

import pytest

from cli.main import main as peer
from tests.support.disk.shadow_disk import Moment, WatchedDisk


def moments_file(home: Path) -> Path:
    return home.with_suffix(".moments")


def read_moments(home: Path) -> list[Moment]:
    found: list[Moment] = pickle.loads(moments_file(home).read_bytes())  # noqa: S301  of a process of this test
    return found


def main() -> None:
    home = Path(sys.argv[sys.argv.index("--home") + 1])
    with pytest.MonkeyPatch.context() as patches:
        disk = WatchedDisk(home, patches)
        try:
            peer()
        finally:
            moments_file(home).write_bytes(pickle.dumps(disk.moments))


if __name__ == "__main__":
    main()
