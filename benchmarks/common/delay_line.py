"""A cable with a delay: creates two TAP devices and carries Ethernet frames between them, each a fixed time late.

    python -m benchmarks.common.delay_line DELAY_MS NAME NAME

Prints `ready` and runs until its standard input ends; the devices are removed then. Frames are as large as the kernel's
(64 KiB, with segmentation and checksums left to the "hardware"), so that a few thousand a second fill a fast link.
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
_QUEUE_MAX = 20_000  # frames on their way in one direction; none is lost, as on a cable


def open_tap(name: str) -> int:
    """Open a TAP device of that name in this network namespace. Frames have virtio's header in both directions."""
    device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(device, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(device, _TUNSETOFFLOAD, _CHECKSUMS_AND_TCP_SEGMENTS)
    return device


def carry(ends: tuple[int, int], delay_s: float, until: int) -> None:
    """Carry frames between `ends` until the file `until` is readable."""
    other = {ends[0]: ends[1], ends[1]: ends[0]}
    waiting: dict[int, deque[tuple[float, bytes]]] = {end: deque() for end in ends}  # by destination
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
    except OSError:  # the device is down: the frame is lost, as on a cable
        return


def main() -> None:
    delay_ms, *names = sys.argv[1:]
    near, far = (open_tap(name) for name in names)
    print("ready", flush=True)
    carry((near, far), float(delay_ms) / 1e3, sys.stdin.fileno())


if __name__ == "__main__":
    main()
