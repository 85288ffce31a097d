"""`peer` as a fork, for tests of what it says. Those of its start, and of what it leaves behind, start programs."""

from __future__ import annotations

import os
from pathlib import Path
from subprocess import PIPE, CompletedProcess

import trio

from tests.support.forking.forked import ForkedProcess
from tests.support.process_group import REPO

LIMIT_S = 300.0


def peer(*arguments: str | Path, given: str = "") -> CompletedProcess[str]:
    """Run the command, its server and its worker as forks; the others end with it, whatever it does."""
    words, alone = [*map(str, arguments)], {**os.environ, "OMP_NUM_THREADS": "1"}
    with ForkedProcess(
        *("cli.main", *words), stdin=PIPE, stdout=PIPE, stderr=PIPE, text=True, env=alone, cwd=REPO
    ) as process:
        try:
            printed, said = process.communicate(given, timeout=LIMIT_S)
        except BaseException:
            process.kill()
            raise
    return CompletedProcess(words, process.returncode, printed, said)


async def peer_meanwhile(*arguments: str | Path) -> CompletedProcess[str]:
    """The same while other tasks of this process go on."""
    return await trio.to_thread.run_sync(lambda: peer(*arguments))
