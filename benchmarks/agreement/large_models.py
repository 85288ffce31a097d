"""What a round of a large model is committed to with, among 64 members.

    python benchmarks/agreement/large_models.py [--members 64] [--model 1] [--method diloco] [--json [FILE]]

The slices are those of the methods' codings of Llama 3.2 1B and 3B and of Llama 2 7B. Then nodes of the real core
(`traffic.py`) exchange that many hashes in virtual time: bytes of the largest message of each kind, as sent.
`unbundled`: how many members a roster would hold if each slice were committed to by itself.
"""

from __future__ import annotations

import argparse
import gc
import sys
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.agreement import large_model_rows  # noqa: E402
from benchmarks.agreement.traffic import CountedGroup  # noqa: E402
from benchmarks.common.options import add_json, write_results  # noqa: E402
from optim.bundles import BUNDLES_MAX, Bundles  # noqa: E402
from optim.config import CodecConfig, DilocoConfig, OuterConfig, SparseLocoConfig, StreamingConfig  # noqa: E402
from peer.config import InnerConfig, ModelConfig  # noqa: E402
from peer.model.layout import FlatLayout  # noqa: E402
from swarm.placement.stages import slices_of_update  # noqa: E402
from swarm.protocol.roster_room import peers_that_fit, usual_bytes  # noqa: E402

INNER: Final = InnerConfig(lr=1e-3, batch_size=8, total_steps=10)
MODELS: Final = {
    1: ModelConfig(
        vocab_size=128256, hidden_size=2048, layers=16, heads=32, kv_heads=8, intermediate_size=8192, max_seq_len=2048
    ),
    3: ModelConfig(
        vocab_size=128256, hidden_size=3072, layers=28, heads=24, kv_heads=8, intermediate_size=8192, max_seq_len=2048
    ),
    7: ModelConfig(
        vocab_size=32000, hidden_size=4096, layers=32, heads=32, kv_heads=32, intermediate_size=11008,
        max_seq_len=2048, tie_embeddings=False,
    ),
}  # fmt: skip
"""By billions of parameters."""
METHODS: Final[dict[str, tuple[OuterConfig, CodecConfig]]] = {
    "diloco": (DilocoConfig(), CodecConfig(up="int8", down="int8")),
    "sparseloco": (SparseLocoConfig(), CodecConfig()),
    "streaming": (StreamingConfig(), CodecConfig(up="int8", down="int8")),
}


@lru_cache
def run_group(members: int, hashes: int) -> dict[str, int]:
    """Run a round of a group whose updates have so many hashes, and return what it merged and its largest messages."""
    group = CountedGroup(members, hashes)
    group.run_to(2, seconds=600.0)
    found = {f"{kind}_bytes": group.largest.get(kind, 0) for kind in ("roster", "proposal", "short_proposal", "chain")}
    return {"merged": group.merged, **found}


def measure(billions: int, method: str, members: int) -> dict[str, Any]:
    """Return a row of the table."""
    layout = FlatLayout.of(MODELS[billions])
    slices = slices_of_update(*METHODS[method], layout, INNER)
    bundles = Bundles.at_most(BUNDLES_MAX, slices)
    return {
        "parameters": layout.numel,
        "method": method,
        "members": members,
        "slices": slices,
        "bundles": bundles.count,
        "contribution_bytes": usual_bytes(bundles.count),
        "unbundled": peers_that_fit(slices),
        **run_group(members, bundles.count),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--members", type=int, default=64)
    parser.add_argument("--model", type=int, action="append", choices=MODELS, help="billions of parameters (all)")
    parser.add_argument("--method", action="append", choices=METHODS, help="(all)")
    add_json(parser, "agreement/large_models")
    options = parser.parse_args()
    gc.set_threshold(50_000)  # what is kept has few cycles
    figures = []
    for billions in options.model or MODELS:
        for method in options.method or METHODS:
            figures.append(measure(billions, method, options.members))
            print(" ".join(f"{name}={value}" for name, value in figures[-1].items()), flush=True)
    if options.json:
        write_results(options.json, figures)
    print(large_model_rows.section(figures))


if __name__ == "__main__":
    main()
