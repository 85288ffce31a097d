"""A cable with a delay: carries Ethernet frames between two TAP devices that it makes, each a fixed time late.

    python -m benchmarks.delay_line DELAY_MS NAME NAME

Says `ready` and runs until its standard input ends; the devices are then gone. Frames are as big as the kernel's
(64 KiB: it leaves segmentation and checksums to the "hardware"), so that a few thousand a second fill a fast link.
"""

from __future__ import annotations

import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

_TUNSETIFF, _TUNSETOFFLOAD = 0x400454CA, 0x400454D0
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_CHECKSUMS_AND_TCP_SEGMENTS = 0x01 | 0x02 | 0x04  # TUN_F_CSUM, TUN_F_TSO4, TUN_F_TSO6
_FRAME_BYTES = 10 + 18 + (1 << 16)  # virtio's header, Ethernet's, the largest packet
_QUEUE_MAX = 20_000  # frames on their way in one direction; a real cable loses none, nor do we


def open_tap(name: str) -> int:
    """A TAP device of that name in this network namespace, as a file; every frame comes after virtio's header, and so
    must those that go."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUMS_AND_TCP_SEGMENTS)
    return device


def carry(ends: tuple[int, int], delay_s: float, until: int) -> None:
    """Between `ends`, until there is something to read from the file `until`."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # by where they go
    while True:
        now = time.monotonic()
        due = min((frames[0][0] for frames in waiting.values() if frames), default=now + 60.0)
        listening = [end for end in ends if len(waiting[other[end]]) < _QUEUE_MAX]
        ready, _, _ = select.select([*listening, until], [], [], max(0.0, due - now))
        if until in ready:
            return
        now = time.monotonic()
        for end in ready:
            _take(end, waiting[other[end]], now + delay_s)
        for end, frames in waiting.items():
            while frames and frames[0][0] <= now:
                _put(end, frames.popleft()[1])


def _take(end: int, frames: deque[tuple[float, bytes]], due: float) -> None:
    while True:
        try:
            frames.append((due, os.read(end, _FRAME_BYTES)))
        except OSError:  # nothing more, or the device is down
            return


def _put(end: int, frame: bytes) -> None:
    try:
        os.write(end, frame)
    except OSError:  # the device is down: what goes there is lost, as on a cable
        return


def main() -> None:
    delay_ms, *names = sys.argv[1:]
    near, far = (open_tap(name) for name in names)
    print("ready", flush=True)
    carry((near, far), float(delay_ms) / 1e3, sys.stdin.fileno())


if __name__ == "__main__":
    main()
