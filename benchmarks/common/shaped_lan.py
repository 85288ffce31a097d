"""A local network whose hosts have slow links: namespaces on a bridge, each behind two token bucket filters of the
kernel (tbf), one a direction (Linux, root).

    lan 10.77.0.1 (bridge, not shaped) == host 0: 10.77.0.2, host 1: 10.77.0.3, ...
"""

from __future__ import annotations

import os
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[2]
BURST_KB = 64  # of a link
CONGESTION = "cubic"  # the default of Linux, macOS and Windows, independent of this machine's setting
QUEUE_MS = 50  # the longest queue of a link, as in a home router
HUB_IP = "10.77.0.1"
LINE_BURST_KB = 160  # a frame is 64 KiB: smaller frames would cost more CPU here
LINE_S = 60.0  # for a delay line to start

Mbit = float | Sequence[tuple[float, float]]
"""The rates of the links, Mbit/s: one for all of them, each way, or for each host that of its way up and down."""


class Unavailable(Exception):
    """This machine cannot make such a network; the text says why and names the remedy."""


class Lan:
    """`hosts` shaped hosts and the hub; from `shaped_lan`."""

    def __init__(self, hosts: int, mbit: Mbit, burst_kb: int = BURST_KB) -> None:
        self._prefix = f"barnraise-lan-{os.getpid()}-"
        self._hosts = hosts
        self._rates = mbit if isinstance(mbit, Sequence) else [(mbit, mbit)] * hosts
        if len(self._rates) != hosts:
            raise ValueError(f"{len(self._rates)} rates for {hosts} hosts: give one for each")
        self._burst_kb = burst_kb
        self._made: list[str] = []

    def ip(self, host: int) -> str:
        return f"10.77.0.{host + 2}"

    def at_hub(self, *command: str) -> list[str]:
        """Return `command` wrapped to run at the hub; the process keeps its id."""
        return ["ip", "netns", "exec", f"{self._prefix}hub", *command]

    def at_host(self, host: int, *command: str) -> list[str]:
        return ["ip", "netns", "exec", self.namespace(host), *command]

    def namespace(self, host: int) -> str:
        """Return its name, as `ip netns` has it."""
        return f"{self._prefix}{host}"

    def build(self) -> None:
        self._add("hub")
        self._run("hub", "ip link add lan type bridge")
        self._run("hub", f"ip address add {HUB_IP}/24 dev lan")
        self._run("hub", "ip link set lan up")
        for host in range(self._hosts):
            self._add(str(host))
            self._lay_cable(host)
            self._run(str(host), f"ip address add {self.ip(host)}/24 dev wan")
            up, down = self._rates[host]
            self._run(str(host), f"tc qdisc add dev wan {self._shape(up)}")
            self._run("hub", f"tc qdisc add dev to-{host} {self._shape(down)}")
            self._run("hub", f"ip link set dev to-{host} master lan up")
            self._run(str(host), "ip link set wan up")
            self._run(str(host), f"ip route replace 10.77.0.0/24 dev wan src {self.ip(host)} congctl {CONGESTION}")

    def _shape(self, mbit: float) -> str:
        return f"root tbf rate {mbit}mbit burst {self._burst_kb}kb latency {QUEUE_MS}ms"

    def _lay_cable(self, host: int) -> None:
        """Create the cable's ends: `wan` at the host and `to-{host}` at the hub."""
        self._run(str(host), f"ip link add wan type veth peer name to-{host} netns {self._prefix}hub")

    def remove(self) -> None:
        for name in self._made:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def _add(self, place: str) -> None:
        name = self._prefix + place
        _call(["ip", "netns", "add", name])
        self._made.append(name)
        self._run(place, "ip link set lo up")

    def _run(self, place: str, command: str) -> None:
        _call(["ip", "netns", "exec", self._prefix + place, *command.split()])


class DelayedLan(Lan):
    """A network with delay for kernels without netem. A cable is two TAP devices and a process that carries frames
    between them (`benchmarks.common.delay_line`), half of the delay late each way."""

    def __init__(self, hosts: int, mbit: Mbit, delay_ms: float) -> None:
        super().__init__(hosts, mbit, LINE_BURST_KB)
        self._delay_ms = delay_ms
        self._lines: list[subprocess.Popen[bytes]] = []

    def _lay_cable(self, host: int) -> None:
        module = (
            sys.executable,
            "-m",
            "benchmarks.common.delay_line",
            f"{self._delay_ms / 2}",
            f"wan-{host}",
            f"to-{host}",
        )
        line = subprocess.Popen(self.at_hub(*module), cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self._lines.append(line)
        assert line.stdout is not None
        ready, _, _ = select.select([line.stdout], [], [], LINE_S)
        if not ready or line.stdout.readline() != b"ready\n":
            raise Unavailable("no TAP device could be created: make /dev/net/tun available")
        self._run("hub", f"ip link set wan-{host} netns {self._prefix}{host} name wan")

    def remove(self) -> None:
        for line in self._lines:
            line.kill()
            line.wait()
            for stream in (line.stdin, line.stdout):
                assert stream is not None
                stream.close()
        super().remove()


@contextmanager
def shaped_lan(hosts: int, mbit: Mbit, delay_ms: float = 0.0) -> Iterator[Lan]:
    """Open a network for the block; end its processes before. A packet between two hosts takes at least `delay_ms`.
    `Unavailable` if this machine cannot make it."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root: run as root, or in a container as root")
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} not installed: install iproute2")
    lan = Lan(hosts, mbit) if delay_ms == 0 else DelayedLan(hosts, mbit, delay_ms)
    try:
        lan.build()
        yield lan
    except subprocess.CalledProcessError as error:
        raise Unavailable(f"`{' '.join(error.cmd)}` fails: {error.stderr.strip()}") from error
    finally:
        lan.remove()


def over_link(pid: int) -> tuple[int, int]:
    """Return the bytes that the host of process `pid` has sent and received over its link, by the kernel's counters,
    headers included; 0 before the process has started."""
    with open(f"/proc/{pid}/net/dev") as counters:
        for line in counters:
            name, _, figures = line.partition(":")
            if name.strip() == "wan":
                received, sent = (int(figures.split()[column]) for column in (0, 8))
                return sent, received
    return 0, 0


def sent_over_link(pid: int) -> int:
    """Return the first of `over_link`."""
    return over_link(pid)[0]


def _call(command: list[str]) -> None:
    subprocess.run(command, capture_output=True, text=True, check=True)
