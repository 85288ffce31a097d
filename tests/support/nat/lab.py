"""Two homes behind NAT and a public network between them, as network namespaces of this machine.

    home-a 10.1.0.2 -- 10.1.0.1 nat-a 198.51.100.11 --+
                                                      +-- 198.51.100.1 public
    home-b 10.2.0.2 -- 10.2.0.1 nat-b 198.51.100.12 --+

The NATs masquerade, drop what they did not ask for, and say nothing about it, as home routers do. Nothing outside these
namespaces is touched.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

PUBLIC_IP = "198.51.100.1"
_PREFIX = "barnraise-nat-"
_HOMES = {"a": 1, "b": 2}


class Unavailable(Exception):
    """This machine cannot make network namespaces; str() says why."""


class Lab:
    """The namespaces `public`, `home-a` and `home-b`."""

    def __init__(self) -> None:
        self._names: list[str] = []

    def namespace(self, place: str) -> str:
        """Its name, as `ip netns` has it."""
        return f"{_PREFIX}{os.getpid()}-{place}"

    def build(self, random_ports: bool) -> None:
        self._add("public")
        self._run("public", "ip link add wan type bridge")
        self._run("public", f"ip address add {PUBLIC_IP}/24 dev wan")
        self._run("public", "ip link set wan up")
        for home, number in _HOMES.items():
            self._add(f"nat-{home}")
            self._add(f"home-{home}")
            self._join(f"nat-{home}", "wan", f"198.51.100.1{number}", "public", f"to-{home}")
            self._run("public", f"ip link set dev to-{home} master wan")
            self._run("public", f"ip link set dev to-{home} up")
            self._join(f"home-{home}", "lan", f"10.{number}.0.2", f"nat-{home}", "lan")
            self._run(f"nat-{home}", f"ip address add 10.{number}.0.1/24 dev lan")
            self._run(f"nat-{home}", "ip link set lan up")
            self._run(f"home-{home}", f"ip route add default via 10.{number}.0.1")
            self._masquerade(f"nat-{home}", random_ports)

    def count_dials(self, home: str) -> None:
        """Count from now on who dials the address that a home has behind its NAT."""
        self._run("public", f"iptables -A OUTPUT -p tcp --syn -d 10.{_HOMES[home]}.0.0/24")

    def dials(self) -> int:
        """Return how many packets asked for a connection to such an address."""
        place = self.namespace("public")
        listed = _call(["ip", "netns", "exec", place, "iptables", "-L", "OUTPUT", "-v", "-x", "-n"])
        return sum(int(line.split()[0]) for line in listed.splitlines()[2:])

    def forward(self, home: str, port: int) -> None:
        """Have a home's router forward a TCP port."""
        inside = f"10.{_HOMES[home]}.0.2"
        self._run(f"nat-{home}", f"iptables -t nat -A PREROUTING -i wan -p tcp --dport {port} -j DNAT --to {inside}")
        self._run(f"nat-{home}", f"iptables -I FORWARD -i wan -p tcp -d {inside} --dport {port} -j ACCEPT")

    def check_kernel(self) -> None:
        """CalledProcessError if this machine lets us have no namespaces, or no NAT in them."""
        self._add("check")
        self._run("check", "iptables -t nat -A POSTROUTING -j MASQUERADE")
        self._run("check", "ip link add one type veth peer name other")

    def remove(self) -> None:
        for name in self._names:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)

    def _masquerade(self, nat: str, random_ports: bool) -> None:
        established = "-m conntrack --ctstate ESTABLISHED,RELATED -j ACCEPT"
        self._run(nat, "sysctl -qw net.ipv4.ip_forward=1")
        self._run(nat, f"iptables -t nat -A POSTROUTING -o wan -j MASQUERADE{' --random' if random_ports else ''}")
        self._run(nat, "iptables -P FORWARD DROP")
        self._run(nat, "iptables -A FORWARD -i lan -o wan -j ACCEPT")
        self._run(nat, f"iptables -A FORWARD -i wan {established}")
        self._run(nat, "iptables -A INPUT -i wan -j DROP")

    def _join(self, place: str, device: str, ip: str, other: str, other_device: str) -> None:
        """A cable from `device` at `place`, which gets `ip`, to `other_device` at `other`."""
        peer = f"peer name {other_device} netns {self.namespace(other)}"
        self._run(place, f"ip link add {device} type veth {peer}")
        self._run(place, f"ip address add {ip}/24 dev {device}")
        self._run(place, f"ip link set {device} up")

    def _add(self, place: str) -> None:
        self._names.append(self.namespace(place))
        _call(["ip", "netns", "add", self.namespace(place)])
        self._run(place, "ip link set lo up")

    def _run(self, place: str, command: str) -> None:
        _call(["ip", "netns", "exec", self.namespace(place), *command.split()])


@contextmanager
def nat_lab(random_ports: bool) -> Iterator[Lab]:
    """A lab that is gone after the block. `random_ports`: the NATs give every connection another port."""
    if os.geteuid() != 0:
        raise Unavailable("network namespaces need root")
    missing = [tool for tool in ("ip", "iptables", "sysctl") if shutil.which(tool) is None]
    if missing:
        raise Unavailable(f"{' and '.join(missing)} not installed")
    _remove_stale()
    lab = Lab()
    try:
        try:
            lab.check_kernel()
            lab.build(random_ports)
        except subprocess.CalledProcessError as error:
            raise Unavailable(f"`{' '.join(error.cmd)}` fails: {error.stderr.strip()}") from error
        yield lab
    finally:
        lab.remove()


def _remove_stale() -> None:
    """Labs of test runs that were killed."""
    for name in _call(["ip", "netns", "list"]).split():
        if name.startswith(_PREFIX):
            with suppress(ValueError):
                pid = int(name.removeprefix(_PREFIX).split("-")[0])
                if not os.path.exists(f"/proc/{pid}"):
                    subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def _call(command: list[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
