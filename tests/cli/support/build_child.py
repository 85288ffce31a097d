"""`peer data build` with a journal after each 16 KiB and 16 buckets, for tests that end it in the middle."""

from __future__ import annotations

import os
import sys

from cli.main import main
from peer.data.building import plan

if __name__ == "__main__":
    if "--one-core" in sys.argv:
        sys.argv.remove("--one-core")
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    vars(plan)["FLUSH_BYTES"] = 1 << 14
    vars(plan)["bucket_count"] = lambda files, tokenizer: 16
    sys.argv[0] = "peer"
    main()
