"""Child of test_ring: puts every record of one ring into another. THERE BACK SIZE RECORDS, each ring by its
descriptors."""

from __future__ import annotations

import sys
import time

from peer.ipc.ring import Ring


def main() -> None:
    there, back = (Ring.attach(_fds(words), int(sys.argv[3])) for words in sys.argv[1:3])
    left = int(sys.argv[4])
    while left:
        for record in there.take(block=True):
            left -= 1
            while not back.put(record):
                time.sleep(0.001)  # a ring that is full tells nobody when it has room, so its users look again
        there.done()


def _fds(words: str) -> tuple[int, int, int]:
    first, second, third = map(int, words.split(","))
    return first, second, third


if __name__ == "__main__":
    main()
