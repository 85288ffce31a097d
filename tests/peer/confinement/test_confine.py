"""A process that confines itself, and what it then tries."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from peer.confinement.landlock import landlock_abi

ROOT = Path(__file__).parents[3]
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(not landlock_abi(), reason="this kernel has no Landlock"),
]

CHILD = """
import ctypes, errno, json, os, resource, socket, subprocess, sys, threading
from pathlib import Path
from peer.confinement.confine import confine
from peer.confinement.grants import Grants

folder, options, listener = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3])
libc = ctypes.CDLL(None, use_errno=True)
said = confine(Grants(private=str(folder / "own"), readable=(str(folder / "data"),), **options))

def call(name, *arguments):
    if getattr(libc, name)(*arguments) < 0:
        raise OSError(ctypes.get_errno(), "")

def unix(kind):
    with socket.socket(socket.AF_UNIX, kind) as sock:
        sock.connect(str(folder / "agent"))

def tcp():
    with socket.create_connection(("127.0.0.1", listener), 5):
        pass

def pair():
    one, other = socket.socketpair()
    one.send(b"x")
    assert other.recv(1) == b"x"

def thread():
    started = threading.Thread(target=(folder / "data" / "text").read_text)
    started.start()
    started.join()

def name_thread():
    found = []
    def work():
        try:
            Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("cuda")
        except OSError as error:
            found.append(error)
    started = threading.Thread(target=work)
    started.start()
    started.join()
    for error in found:
        raise error

def name_socket():
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind("\\0barnraise")

def fork():
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)

def rename():
    (folder / "own" / "new").write_text("new")
    os.replace(folder / "own" / "new", folder / "own" / "old")
    os.truncate(folder / "own" / "old", 0)
    os.remove(folder / "own" / "old")

tries = {
    "read key": lambda: (folder / ".ssh" / "x").read_text(),
    "list keys": lambda: os.listdir(folder / ".ssh"),
    "read key in a thread": lambda: reading_thread(),
    "read linked text": lambda: (folder / "data" / "link").read_text(),
    "read text": lambda: (folder / "data" / "text").read_text(),
    "write text": lambda: (folder / "data" / "text").write_text("!"),
    "cut text": lambda: os.truncate(folder / "data" / "text", 0),
    "write own": rename,
    "mode of key": lambda: os.chmod(folder / ".ssh" / "x", 0o777),
    "environment of parent": lambda: Path(f"/proc/{os.getppid()}/environ").read_bytes(),
    "signal to parent": lambda: os.kill(os.getppid(), 0),
    "internet": lambda: socket.socket(socket.AF_INET),
    "tcp": tcp,
    "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
    "agent": lambda: unix(socket.SOCK_STREAM),
    "datagram": lambda: unix(socket.SOCK_DGRAM),
    "pair": pair,
    "program": lambda: subprocess.run(["/bin/true"], check=True),
    "exec": lambda: os.execv("/nowhere", ["/nowhere"]),
    "ptrace": lambda: call("ptrace", 16, os.getppid(), 0, 0),
    "unshare": lambda: call("unshare", 0x10000000),
    "mount": lambda: call("mount", b"none", b"/mnt", b"tmpfs", 0, None),
    "thread": thread,
    "fork": fork,
    "name a thread": name_thread,
    "name a socket": name_socket,
    "name of parent": lambda: Path(f"/proc/{os.getppid()}/comm").write_text("x"),
}

def reading_thread():
    caught = []
    def read():
        try:
            tries["read key"]()
        except OSError as error:
            caught.append(error)
    started = threading.Thread(target=read)
    started.start()
    started.join()
    for error in caught:
        raise error

if os.environ["BARNRAISE_SANDBOX"] == "off":
    tries = {"read key": tries["read key"]}  # the others would succeed, too
outcomes = {}
for name, attempt in tries.items():
    try:
        attempt()
    except OSError as error:
        outcomes[name] = errno.errorcode[error.errno]
    else:
        outcomes[name] = "done"
print(json.dumps({
    "said": {one.name: [one.in_force, one.detail] for one in said},
    "outcomes": outcomes,
    "compile threads": os.environ.get("TORCHINDUCTOR_COMPILE_THREADS"),
    "core": resource.getrlimit(resource.RLIMIT_CORE),
    "dumpable": libc.prctl(3, 0, 0, 0, 0),
    "privileges": libc.prctl(39, 0, 0, 0, 0),
}))
"""
OUTSIDE = {
    "read key": "EACCES",
    "list keys": "EACCES",
    "read key in a thread": "EACCES",
    "write text": "EACCES",
    "cut text": "EACCES",
    "environment of parent": "EACCES",
    "netlink": "EPERM",
    "agent": "EPERM",
    "datagram": "EPERM",
    "ptrace": "EPERM",
    "unshare": "EPERM",
    "mount": "EPERM",
    "name of parent": "EACCES",
}
ALONE = {"internet": "EPERM", "tcp": "EPERM"}
NO_DRIVER = {"name a thread": "EACCES", "name a socket": "EPERM"}
NO_PROGRAMS = {"program": "EPERM", "exec": "EPERM", "mode of key": "EPERM"}


def confined(folder: Path, switch: str = "", **options: bool) -> dict[str, Any]:
    """What a child reports that confines itself with these options."""
    for name in ("own", "data", ".ssh", "blobs"):
        (folder / name).mkdir()
    for name in (".ssh/x", "data/text", "blobs/1"):
        (folder / name).write_text("text")
    (folder / "data" / "link").symlink_to("../blobs/1")
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "BARNRAISE_SANDBOX": switch}
    with socket.socket(socket.AF_UNIX) as agent, socket.create_server(("127.0.0.1", 0)) as listener:
        agent.bind(str(folder / "agent"))
        agent.listen()
        command = [sys.executable, "-c", CHILD, str(folder), json.dumps(options), str(listener.getsockname()[1])]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["core"] == [0, 0] and report["dumpable"] == 0 and report["privileges"] == 1
    return report


def test_it_keeps_its_files_its_threads_and_its_socket_pairs(tmp_path: Path) -> None:
    report = confined(tmp_path)
    signals = "EPERM" if landlock_abi() >= 6 else "done"
    refused = {name: result for name, result in report["outcomes"].items() if result != "done"}
    assert refused == {
        **OUTSIDE,
        **ALONE,
        **NO_PROGRAMS,
        **NO_DRIVER,
        **({"signal to parent": signals} if signals != "done" else {}),
    }
    assert all(in_force for in_force, _ in report["said"].values())
    assert report["said"]["landlock"] == [True, f"ABI {landlock_abi()}"]


def test_one_that_compiles_starts_programs(tmp_path: Path) -> None:
    report = confined(tmp_path, compiles=True)
    outcomes = report["outcomes"]
    assert {name: outcomes[name] for name in (*OUTSIDE, *ALONE)} == {**OUTSIDE, **ALONE}
    assert outcomes["program"] == "done" and outcomes["exec"] == "ENOENT" and report["compile threads"] is None
    assert report["said"]["seccomp"] == [True, "in force, but for programs (--compile)"]


def test_one_that_compiles_for_a_gpu_does_so_in_its_own_process(tmp_path: Path) -> None:
    """Torch's compile workers are processes, which could not open the GPU: "Could not find an active GPU backend"."""
    assert confined(tmp_path, compiles=True, accelerators=True)["compile threads"] == "1"


def test_one_with_a_gpu_names_its_threads_and_sockets(tmp_path: Path) -> None:
    """Else cuInit of NVIDIA's driver fails (580.159, error 304)."""
    outcomes = confined(tmp_path, accelerators=True)["outcomes"]
    assert {name: outcomes[name] for name in NO_DRIVER} == dict.fromkeys(NO_DRIVER, "done")
    kept = {**OUTSIDE, **ALONE, **NO_PROGRAMS}
    assert {name: outcomes[name] for name in kept} == kept


def test_one_of_several_ranks_uses_tcp(tmp_path: Path) -> None:
    outcomes = confined(tmp_path, tcp=True)["outcomes"]
    kept = {name: result for name, result in OUTSIDE.items() if name not in ("netlink", "agent", "datagram")}
    assert {name: outcomes[name] for name in (*kept, *NO_PROGRAMS)} == {**kept, **NO_PROGRAMS}
    assert outcomes["internet"] == outcomes["tcp"] == "done"


def test_the_switch_leaves_out_what_a_driver_may_need(tmp_path: Path) -> None:
    report = confined(tmp_path, switch="off")
    assert report["outcomes"]["read key"] == "done"
    for name in ("landlock", "seccomp"):
        assert report["said"][name] == [False, "BARNRAISE_SANDBOX=off"]
