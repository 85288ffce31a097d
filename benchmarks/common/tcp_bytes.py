"""Bytes that processes have sent over TCP, from the kernel's counters (Linux): one measure for every program."""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterable, Iterator

import psutil

_SOCK_DIAG_BY_FAMILY = 20
_REQUEST_DUMP = 0x301  # NLM_F_REQUEST | NLM_F_DUMP
_DONE = 3
_TCP_INFO = 2  # INET_DIAG_INFO
_BYTES_SENT = 200  # offset of tcpi_bytes_sent in struct tcp_info
_HEADER = struct.Struct("=IHHII")
_MESSAGE_BYTES = 72  # struct inet_diag_msg; the inode is its last field


def family(pid: int | None = None) -> list[psutil.Process]:
    """Return a process (default: this one) and its descendants."""
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


def sent_bytes(pids: Iterable[int]) -> int:
    """Return the bytes that these processes' open TCP sockets have sent, with retransmissions, without TCP/IP
    headers."""
    mine = {inode for pid in pids for inode in _socket_inodes(pid)}
    return sum(sent for inode, sent in _all_sockets() if inode in mine)


def _socket_inodes(pid: int) -> Iterator[int]:
    folder = f"/proc/{pid}/fd"
    for name in os.listdir(folder):
        try:
            target = os.readlink(f"{folder}/{name}")
        except FileNotFoundError:
            continue
        if target.startswith("socket:["):
            yield int(target[8:-1])


def _all_sockets() -> Iterator[tuple[int, int]]:
    """Yield (inode, bytes sent) of every TCP socket of this network namespace."""
    for version in (socket.AF_INET, socket.AF_INET6):
        with socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 4) as netlink:  # NETLINK_SOCK_DIAG
            body = struct.pack("=BBBBI48x", version, socket.IPPROTO_TCP, 1 << (_TCP_INFO - 1), 0, 0xFFFFFFFF)
            netlink.settimeout(5.0)
            netlink.send(_HEADER.pack(_HEADER.size + len(body), _SOCK_DIAG_BY_FAMILY, _REQUEST_DUMP, 1, 0) + body)
            ended = False
            while not ended:
                data = netlink.recv(1 << 20)
                while len(data) >= _HEADER.size:
                    size, kind, *_ = _HEADER.unpack_from(data)
                    ended = ended or kind == _DONE
                    if kind == _SOCK_DIAG_BY_FAMILY:
                        yield _parse(data[_HEADER.size : size])
                    data = data[(size + 3) & ~3 :]


def _parse(message: bytes) -> tuple[int, int]:
    (inode,) = struct.unpack_from("=I", message, _MESSAGE_BYTES - 4)
    at = _MESSAGE_BYTES
    while at + 4 <= len(message):
        size, kind = struct.unpack_from("=HH", message, at)
        if kind == _TCP_INFO and size >= 4 + _BYTES_SENT + 8:
            return inode, struct.unpack_from("=Q", message, at + 4 + _BYTES_SENT)[0]
        at += max((size + 3) & ~3, 4)
    return inode, 0
