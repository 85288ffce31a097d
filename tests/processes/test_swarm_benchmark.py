"""The pipeline benchmark's parts at a small size: a chain of real processes, and links with a delay (times of ours are
not tested)."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.common.shaped_lan import shaped_lan
from benchmarks.pipelines.swarm_runs import WARM_UP, open_whole, run_chain
from benchmarks.pipelines.swarm_setting import THIN

pytestmark = pytest.mark.process
DELAY_MS = 30.0
ECHO = """
import socket, sys
server = socket.create_server((sys.argv[1], 5000))
print("ready", flush=True)
client, _ = server.accept()
while data := client.recv(1 << 16):
    client.sendall(data)
"""
PING = """
import socket, sys, time
client = socket.create_connection((sys.argv[1], 5000))
fastest = 1e9
for _ in range(20):
    begin = time.monotonic()
    client.sendall(b"x")
    client.recv(1)
    fastest = min(fastest, time.monotonic() - begin)
client.sendall(bytes(1 << 20))
left = 1 << 20
while left:
    left -= len(client.recv(1 << 16))
print(fastest)
"""


@pytest.mark.soak  # its traffic is bounded
def test_two_stages_send_little_more_than_their_values() -> None:
    with open_whole(THIN, 2, copies=1) as whole:
        (row,) = run_chain(THIN, 2, None, 1.0, whole, repeats=1)
    sent = 1 + row["retried"] / row["micro_batches"]  # a machine that stands still sends some once more
    assert row["micro_batches"] >= WARM_UP
    assert 1.0 < row["bytes_a_hop"] / row["ideal_bytes"] < 1.05 * sent
    assert row["tokens_per_s"] > 0 and row["whole_cpu_us"] > 0 and all(0 < share < 1.2 for share in row["device_busy"])


@pytest.mark.skipif(
    os.geteuid() != 0 or shutil.which("tc") is None or not Path("/dev/net/tun").exists(),
    reason="network namespaces need root and iproute2, delays /dev/net/tun",
)
def test_a_delayed_link_is_late_and_loses_nothing() -> None:
    with shaped_lan(2, mbit=200.0, delay_ms=DELAY_MS) as lan:
        echo = subprocess.Popen(lan.at_host(0, sys.executable, "-c", ECHO, lan.ip(0)), stdout=subprocess.PIPE)
        try:
            assert echo.stdout is not None and echo.stdout.readline() == b"ready\n"
            ping = lan.at_host(1, sys.executable, "-c", PING, lan.ip(0))
            done = subprocess.run(ping, capture_output=True, text=True, timeout=300, check=True)
        finally:
            echo.kill()
            echo.communicate()
    fastest_ms = 1e3 * float(done.stdout)
    assert fastest_ms >= 2 * DELAY_MS
