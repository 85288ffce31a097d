"""The machine's limits: the bytes of a round through a socket and through memory."""

from __future__ import annotations

import os
import socket
import threading
import time

import torch

PIECE_BYTES = 1 << 20
TRIES = 3
TIMEOUT_S = 60.0


def measure_limits(wire_bytes: int, memory_bytes: int) -> dict[str, float]:
    """Measure the seconds for `wire_bytes` over one plain TCP connection on 127.0.0.1, and for `memory_bytes`, half of
    them read and half written, by all cores at once; the best of a few tries each."""
    return {
        "tcp_s": min(_tcp_s(wire_bytes) for _ in range(TRIES)),
        "memory_s": min(_memory_s(memory_bytes) for _ in range(TRIES)),
    }


def _tcp_s(size_bytes: int) -> float:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as sender:
        sender.settimeout(TIMEOUT_S)
        sender.connect(server.getsockname())
        receiver, _ = server.accept()
        receiver.settimeout(TIMEOUT_S)
        with receiver:
            thread = threading.Thread(target=_send, args=(sender, size_bytes))
            buffer = bytearray(PIECE_BYTES)
            began = time.perf_counter()
            thread.start()
            left = size_bytes
            while left:
                left -= receiver.recv_into(buffer)
            thread.join()
            return time.perf_counter() - began


def _send(sender: socket.socket, size_bytes: int) -> None:
    piece = memoryview(bytes(PIECE_BYTES))
    while size_bytes:
        size_bytes -= sender.send(piece[:size_bytes])


def _memory_s(size_bytes: int) -> float:
    cores = os.cpu_count() or 1
    numel = max(size_bytes // 8 // cores, 1)
    block = min(numel, 1 << 26)  # many times the cache
    pairs = [(torch.zeros(block), torch.ones(block)) for _ in range(cores)]

    def copy(target: torch.Tensor, source: torch.Tensor) -> None:
        left = numel
        while left > 0:
            target[:left].copy_(source[:left])
            left -= block

    threads = [threading.Thread(target=copy, args=pair) for pair in pairs]
    began = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return time.perf_counter() - began
