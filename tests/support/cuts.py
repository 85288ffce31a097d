"""Hosts on one bridge whose packets are swallowed, from whom and to whom a test says.

A packet is dropped where it arrives and the sender is told nothing, as with a cut cable or a full queue: no reset, no
"unreachable". Each host is a network namespace with rules of its own (iptables); one file of rules replaces the last
one at once.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Final

from benchmarks.common.shaped_lan import Lan, Unavailable, shaped_lan
from tests.support.process_group import Launch

MBIT: Final = 200.0
PORT: Final = 31337
COORDINATOR: Final = "coordinator"

Cut = tuple[str, str]
"""From, to: what the first sends does not reach the second."""


class CutLan:
    """A host for each of `names`, in order; from `cut_lan`."""

    def __init__(self, lan: Lan, names: Iterable[str]) -> None:
        self._lan = lan
        self._hosts = {name: host for host, name in enumerate(names)}

    def launch(self, name: str) -> Launch:
        """Return how to start the process of that name on its host."""
        host = self._hosts[name]
        return Launch(f"/ip4/{self._lan.ip(host)}/tcp/{PORT}", self._lan.namespace(host))

    def cut(self, *cuts: Cut, loss: float = 0.0) -> None:
        """From now on swallow these and no others, and lose a share of all other packets."""
        from_whom: dict[str, list[str]] = {name: [] for name in self._hosts}
        for sender, receiver in cuts:
            from_whom[receiver].append(sender)
        with ThreadPoolExecutor(len(self._hosts)) as pool:
            list(pool.map(lambda name: self._rule(name, from_whom[name], loss), self._hosts))

    def heal(self) -> None:
        """From now on let everything through."""
        self.cut()

    def _rule(self, name: str, swallowed: Iterable[str], loss: float) -> None:
        rules = [f"-A INPUT -s {self._lan.ip(self._hosts[sender])} -j DROP" for sender in swallowed]
        if loss:
            rules.append(f"-A INPUT -m statistic --mode random --probability {loss} -j DROP")
        table = "\n".join(["*filter", ":INPUT ACCEPT", *rules, "COMMIT", ""])
        command = self._lan.at_host(self._hosts[name], "iptables-restore", "-w")
        subprocess.run(command, input=table, text=True, capture_output=True, check=True)


def between(left: Iterable[str], right: Iterable[str]) -> list[Cut]:
    """Return the cuts of a partition: neither side hears the other."""
    ends = [(a, b) for a in left for b in right]
    return [*ends, *((b, a) for a, b in ends)]


def towards(sender: str, receivers: Iterable[str]) -> list[Cut]:
    """Return the cuts after which `sender` is heard by none of the receivers, and hears all."""
    return [(sender, receiver) for receiver in receivers if receiver != sender]


@contextmanager
def cut_lan(names: Iterable[str]) -> Iterator[CutLan]:
    """Open a network for the block; end its processes before. `Unavailable` if this machine cannot make it."""
    hosts = (COORDINATOR, *names)
    if shutil.which("iptables-restore") is None:
        raise Unavailable("iptables-restore not installed: install iptables")
    with shaped_lan(len(hosts), MBIT) as lan:
        made = CutLan(lan, hosts)
        made.cut(loss=0.5)  # CalledProcessError where the kernel has no such rules
        made.heal()
        yield made
