"""Children end with the command that started them, even frozen ones."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cli.commands.quickstart import run_toml
from cli.demo.child_processes import children
from cli.demo.cluster import LocalCluster
from cli.progress.progress import Progress
from peer.errors import RoundError

pytestmark = pytest.mark.process

FREEZES = """
import sys, time
from pathlib import Path
from cli.demo.child_processes import children
from cli.demo.cluster import COORDINATOR, LocalCluster
from cli.run import report_failure, stopping_by_signal
from cli.progress.progress import Progress
try:
    with stopping_by_signal(), children() as group:
        cluster = LocalCluster(Path(sys.argv[1]), 4, group, Progress("test"), lambda: None)
        cluster.begin()
        group.peers[COORDINATOR].freeze()
        print("frozen", flush=True)
        while True:
            time.sleep(60)
except BaseException as error:
    sys.exit(report_failure(error))
"""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_frozen_child_leaves_however_its_parent_ends(tmp_path: Path, signum: signal.Signals) -> None:
    if signum == signal.SIGKILL and sys.platform != "linux":
        pytest.skip("only Linux thaws the children of a killed process")
    (tmp_path / "run.toml").write_text(run_toml(4))
    command = [sys.executable, "-c", FREEZES, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stdin=subprocess.DEVNULL) as parent:
        assert parent.stdout is not None and parent.stdout.readline() == b"frozen\n"
        family = psutil.Process(parent.pid).children(recursive=True)
        assert family
        parent.send_signal(signum)
        _, alive = psutil.wait_procs(family, timeout=60)
        for process in alive:
            process.kill()
        assert not alive
        assert parent.wait(60) == (-signum if signum == signal.SIGKILL else 128 + signum)


def test_a_child_that_fails_ends_the_run(tmp_path: Path) -> None:
    with children() as group:
        cluster = LocalCluster(tmp_path, 4, group, Progress("test"), lambda: None)
        group.start("peer-1", tmp_path / "peer-1", ["join", "nonsense"], threads=1)
        with pytest.raises(RoundError, match=r"peer-1 ended with exit code 2 \(.*is no invite.*read the logs in"):
            cluster.wait(200, "it ends", lambda: False)
