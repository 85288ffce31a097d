"""The entry point of a worker process: `python -m peer.worker.main CONTROL_FD PARENT_PID NICENESS [NETWORK_FD...]`,
started by the network process.

Before it loads anything large it confines itself (`peer.confinement`): it computes on strangers' numbers, and needs no
network, no other program and few files. The main thread then runs the program that the first message is for. A second
thread listens on the control socket, so that a stop is read during a step, and the end of the parent ends this process
at once. No error is caught here: a worker that fails dies with its traceback, as plain text, in worker.log, and the
parent replaces its group.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import sys
import threading
import traceback
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from peer.confinement import kernel
from peer.confinement.confine import Restriction, confine
from peer.confinement.grants import load_nvidia_modules
from peer.confinement.private_network import enter_network
from peer.errors import ConfigError
from peer.ipc.early_maps import map_early
from peer.ipc.messages import Rejected
from peer.plain_text import plain
from peer.worker.control_link import ControlLink
from peer.worker.launch import BEHIND_THE_NETWORK
from peer.worker.programs import PROGRAMS


def _follow_parent(parent_pid: int) -> None:
    """Let the kernel kill this process with its parent. Where the kernel cannot, the end of the control socket does."""
    if sys.platform == "linux":
        kernel.follow_parent(signal.SIGKILL)
    if os.getppid() != parent_pid:  # the parent died before the line above
        os._exit(0)


def _yield_to_others(niceness: int) -> None:
    """Lower this process's priority. If memory runs out the worker must be the one to die."""
    os.nice(niceness)
    if sys.platform == "linux":
        if niceness > BEHIND_THE_NETWORK:
            _yield_to_workers(niceness - BEHIND_THE_NETWORK)
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("500")


def _yield_to_workers(niceness: int) -> None:
    """Lower the priority against other workers where the kernel schedules each session of processes as one, whatever
    their nice values are (`sched_autogroup`)."""
    with suppress(OSError):  # a kernel without it, or a /proc that cannot be written
        Path("/proc/self/autogroup").write_text(str(niceness))


def report(kind: type[BaseException], error: BaseException | None, trace: TracebackType | None) -> None:
    """Write a traceback to standard error, which is worker.log: an error may quote what others wrote."""
    for line in "".join(traceback.format_exception(kind, error, trace)).splitlines():
        sys.stderr.write(plain(line) + "\n")


def main() -> None:
    gc.disable()  # a fifth of the time of an import goes into looking for garbage that is not there
    sys.excepthook = report
    threading.excepthook = lambda hook: report(hook.exc_type, hook.exc_value, hook.exc_traceback)
    control_fd, parent_pid, niceness, *network = map(int, sys.argv[1:])
    enter_network(network)
    _follow_parent(parent_pid)
    link = ControlLink(socket.socket(fileno=control_fd))
    load = link.receive_load()
    entry = PROGRAMS[type(load)]
    _yield_to_others(max(niceness, entry.niceness(load)))
    grants = entry.grants(load)
    if grants.accelerators:
        load_nvidia_modules()
    for fd in entry.vectors(load):
        map_early(fd)
    restrictions = confine(grants)
    if grants.tcp:
        own = bool(network)
        restrictions += (Restriction("network", own, "the group's own" if own else "the machine's"),)
    program = entry.find()  # not sooner: torch starts threads, which would not be confined
    try:
        link.takes(program.commands)
        threading.Thread(target=link.listen, name="control", daemon=True).start()
        worker = program(link, load)
    except ConfigError as error:
        link.send(Rejected(str(error)))
        return
    link.emit("worker_confined", pid=os.getpid(), **{one.name: one.detail for one in restrictions})
    gc.freeze()
    gc.enable()
    worker.run()


if __name__ == "__main__":
    main()
