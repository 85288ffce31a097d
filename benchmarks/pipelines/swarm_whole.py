"""A child of `benchmarks/pipelines/swarm.py`: the whole model of so many stages in one process, with plain torch and
the same micro-batches.

    python -m benchmarks.pipelines.swarm_whole SETTING STAGES THREADS

Says {"ready": true}; at each line {"seconds": s} it makes micro-batches for so long and says what that took.
"""

from __future__ import annotations

import json
import sys
import time

import torch
import torch.nn.functional as F

from benchmarks.pipelines.swarm_setting import SEED, SETTINGS, some_tokens
from peer.model.decoder import Decoder
from peer.model.layout import init_flat


def main() -> None:
    setting = SETTINGS[sys.argv[1]]
    config = setting.model(int(sys.argv[2]))
    torch.set_num_threads(int(sys.argv[3]))
    generator = torch.Generator().manual_seed(SEED)
    flat = init_flat(config, SEED)
    model = Decoder(config, flat)
    model.bind_gradients(torch.zeros_like(flat))

    def micro_batch() -> None:
        tokens = some_tokens(setting, generator)
        logits = model(tokens[:, :-1])
        F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").backward()

    micro_batch()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        until = time.monotonic() + json.loads(line)["seconds"]
        begin, cpu, count = time.monotonic(), time.process_time(), 0
        while time.monotonic() < until:
            micro_batch()
            count += 1
        wall_s, cpu_s = time.monotonic() - begin, time.process_time() - cpu
        print(json.dumps({"tokens": count * setting.tokens, "wall_s": wall_s, "cpu_s": cpu_s}), flush=True)


if __name__ == "__main__":
    main()
