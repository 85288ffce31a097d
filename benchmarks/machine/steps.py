"""Training steps on one GPU: tokens a second, the share of its peak (MFU), and memory beside the arithmetic.

    python benchmarks/machine/steps.py [--models 125M,350M,1B] [--compile] [--fp16] [--rival] [--json [FILE]]

Each model takes the step that `peer.compute.measured_step` finds, as a worker does at its start, then each way of
recomputation with the same micro-batch. Beside it in the same run: the rate of bf16 matrix products that the card
reaches, which is the limit of all, and (`--rival`) the Llama of `transformers` with torch's fused AdamW on the same
micro-batches. MFU counts the FLOPs of `peer.footprint.work` once, whatever is computed twice, against the vendor's
dense bf16 rate. At the end a step runs out of memory on purpose.
"""

from __future__ import annotations

import argparse
import importlib
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final, Literal

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.common.options import add_json, write_results
from optim.config import CodecConfig, DilocoConfig
from optim.wire_sizes import exchange_of
from peer.compute.device import resolve_device
from peer.compute.measured_step import measured_step
from peer.compute.train_loop import InnerTrainer
from peer.config import InnerConfig, ModelConfig
from peer.footprint.cards import CARDS
from peer.footprint.device import CONTEXT_BYTES, device_items
from peer.footprint.parameters import parameter_shapes
from peer.footprint.step_size import RECOMPUTE, StepSize, sized
from peer.footprint.work import training_work
from peer.footprint.workload import Workload
from peer.model.layout import init_flat

SEQ_LEN: Final = 2048
WARM, TIMED = 2, 5
MODELS: Final = {"125M": (768, 12, 12, 12, 2048), "350M": (1024, 24, 16, 16, 2816), "1B": (2048, 16, 32, 8, 8192)}
"""Width, blocks, heads, heads of keys, MLP. Of 32,000 tokens, tied."""
COLUMNS: Final = {
    "model": "what",
    "sequences at a time": "micro_batch",
    "recomputed": "recompute",
    "s a step": "step_s",
    "tokens/s": "tokens_s",
    "TFLOP/s": "tflops",
    "MFU": "mfu",
    "peak GB": "peak_gb",
    "counted GB": "counted_gb",
}
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", default="125M,350M,1B")
    parser.add_argument("--batch", type=int, default=32, help="sequences of a step")
    parser.add_argument("--compile", action="store_true", help="also with torch.compile")
    parser.add_argument("--fp16", action="store_true", help="also with products in fp16")
    parser.add_argument("--rival", action="store_true", help="also transformers")
    add_json(parser, "machine/steps")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("there is no GPU: nothing is measured")
    rows = list(measured(options))
    if options.json:
        write_results(options.json, {"card": torch.cuda.get_device_name(), **as_table(rows)})
    if any(row.get("failed") for row in rows):
        raise SystemExit(1)


def measured(options: argparse.Namespace) -> Iterator[Row]:
    """Measure and print one row after the other."""
    yield shown({"what": "bf16 products of 8192 x 8192", "tflops": product_rate() / 1e12})
    for name in options.models.split(","):
        model = model_of(name)
        trainer = trainer_of(model, options.batch)
        size = measured_step(trainer, SEQ_LEN, float("inf"))
        trainer.resize(size)
        yield shown(row(f"{name}, as found", model, trainer, size))
        for recompute in RECOMPUTE:
            if recompute != size.recompute:
                trainer.resize(StepSize(size.sequences, recompute))
                yield shown(row(f"{name}, {recompute}", model, trainer, trainer.step_size))
        del trainer
        if options.compile:
            trainer = trainer_of(model, options.batch, compiles=True)
            trainer.resize(size)
            yield shown(row(f"{name}, compiled", model, trainer, size))
            del trainer
        if options.fp16:
            trainer = trainer_of(model, options.batch, dtype="fp16")
            trainer.resize(size)
            yield shown(row(f"{name}, fp16", model, trainer, size))
            del trainer
        if options.rival:
            yield shown(rival(name, model, size.sequences, options.batch))
    yield shown(on_a_smaller_card("adamw", 24, options.batch))
    yield shown(on_a_smaller_card("adamw8bit", 16, options.batch))
    yield shown(out_of_memory(options.batch))


def on_a_smaller_card(optimizer: Literal["adamw", "adamw8bit"], card_gb: int, batch: int) -> Row:
    """Train the largest model held to the memory of a smaller card, as `peer join --memory-limit` holds a worker."""
    model = model_of("1B")
    trainer = trainer_of(model, batch, optimizer=optimizer)
    size = measured_step(trainer, SEQ_LEN, card_gb * 1e9 - CONTEXT_BYTES["cuda"])
    trainer.resize(size)
    found = row(f"1B, {optimizer}, held to {card_gb} GB", model, trainer, size)
    return {**found, "failed": found["peak_gb"] > card_gb}


def model_of(name: str) -> ModelConfig:
    width, layers, heads, kv_heads, inner = MODELS[name]
    return ModelConfig(
        vocab_size=32_000,
        hidden_size=width,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        intermediate_size=inner,
        max_seq_len=SEQ_LEN,
    )


def trainer_of(
    model: ModelConfig,
    batch: int,
    compiles: bool = False,
    optimizer: Literal["adamw", "adamw8bit"] = "adamw",
    dtype: Literal["auto", "fp16"] = "auto",
) -> InnerTrainer:
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)
    inner = InnerConfig(lr=1e-4, batch_size=batch, total_steps=1000, optimizer=optimizer, dtype=dtype)
    trainer = InnerTrainer(model, inner, resolve_device("cuda", compiles))
    trainer.local.copy_(init_flat(model, seed=0))
    return trainer


def tokens_of(batch: int) -> torch.Tensor:
    return torch.randint(0, 32_000, (batch, SEQ_LEN + 1), generator=torch.Generator().manual_seed(0))


def row(what: str, model: ModelConfig, trainer: InnerTrainer, size: StepSize) -> Row:
    batch = trainer.config.batch_size
    tokens = tokens_of(batch)
    step_s, peak = timed(lambda: trainer.step(tokens, 1))
    items = device_items(sized(workload(model, trainer.config), size))
    counted = sum(items.values()) - items["context"] - items["fragmentation"]  # of neither do tensors take anything
    return {
        "what": what,
        "micro_batch": size.sequences,
        "recompute": size.recompute,
        **pace(model, batch, step_s),
        "peak_gb": peak / 1e9,
        "counted_gb": counted / 1e9,
    }


def pace(model: ModelConfig, batch: int, step_s: float) -> Row:
    tokens = batch * SEQ_LEN
    rate = tokens * training_work(model, range(model.layers), SEQ_LEN) / step_s
    return {"step_s": step_s, "tokens_s": tokens / step_s, "tflops": rate / 1e12, "mfu": rate / peak_rate()}


def timed(step: Callable[[], object]) -> tuple[float, int]:
    """Return the seconds of a step and the most memory that tensors took meanwhile."""
    for _ in range(WARM):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    started = time.perf_counter()
    for _ in range(TIMED):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / TIMED, torch.cuda.max_memory_allocated()


def workload(model: ModelConfig, inner: InnerConfig) -> Workload:
    return Workload(
        model=model,
        inner=inner,
        exchange=exchange_of(DilocoConfig(steps=10), CodecConfig(), parameter_shapes(model), peers=8),
        blocks=range(model.layers),
        seq_len=SEQ_LEN,
        sequences=inner.batch_size,
        device="cuda",
        narrow=True,
    )


def peak_rate() -> float:
    """Return the vendor's dense bf16 rate of this card, as far as it is known."""
    name = torch.cuda.get_device_name().lower()
    return next((card.peak for key, card in CARDS.items() if key in name.replace(" ", "")), float("nan"))


def product_rate() -> float:
    """Return the FLOP/s of large bf16 products."""
    a, b = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    step_s, _ = timed(lambda: [a @ b for _ in range(20)])
    return 20 * 2 * 8192**3 / step_s


def rival(name: str, model: ModelConfig, micro_batch: int, batch: int) -> Row:
    """Train the Llama of transformers with as many sequences at a time."""
    transformers: Any = importlib.import_module("transformers")
    config = transformers.LlamaConfig(
        vocab_size=model.vocab_size,
        hidden_size=model.hidden_size,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.kv_heads,
        intermediate_size=model.intermediate_size,
        max_position_embeddings=SEQ_LEN,
        tie_word_embeddings=True,
        attn_implementation="sdpa",
        use_cache=False,
    )
    llama = transformers.LlamaForCausalLM(config).cuda().train()
    optimizer = torch.optim.AdamW(llama.parameters(), lr=1e-4, fused=True)
    tokens = tokens_of(batch)[:, :SEQ_LEN].cuda()

    def step() -> None:
        for part in tokens.split(micro_batch):
            with torch.autocast("cuda", torch.bfloat16):
                loss = llama(input_ids=part, labels=part).loss * len(part) / batch
            loss.backward()
        torch.nn.utils.clip_grad_norm_(llama.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    what = f"{name}, transformers {transformers.__version__}"
    try:
        step_s, peak = timed(step)
    except torch.OutOfMemoryError:
        return {"what": what, "micro_batch": micro_batch, "out_of_memory": True}
    return {"what": what, "micro_batch": micro_batch, **pace(model, batch, step_s), "peak_gb": peak / 1e9}


def out_of_memory(batch: int) -> Row:
    """Let a step run out of memory: it must be halved until it fits, and give the gradient of the whole batch."""
    model, tokens = model_of("125M"), tokens_of(batch)
    trainer = trainer_of(model, batch)
    trainer.resize(StepSize(4))
    trainer.step(tokens, 0)
    exact = trainer.gradient.clone()
    trainer.local.copy_(init_flat(model, seed=0))
    trainer.step(tokens, 0)
    noise = float((trainer.gradient - exact).norm() / exact.norm())  # of two equal steps, if there is any
    trainer.local.copy_(init_flat(model, seed=0))
    trainer.resize(StepSize(batch))
    torch.cuda.empty_cache()
    whole = torch.cuda.get_device_properties(0).total_memory
    room = torch.cuda.memory_reserved() + (8 << 30)
    torch.cuda.set_per_process_memory_fraction(room / whole)
    sizes: list[StepSize] = []
    trainer.on_smaller = sizes.append
    trainer.step(tokens, 0)
    away = float((trainer.gradient - exact).norm() / exact.norm())
    torch.cuda.set_per_process_memory_fraction(1.0)
    return {
        "what": f"125M with 8.6 GB for a step of {batch}",
        "micro_batch": trainer.step_size.sequences,
        "recompute": trainer.step_size.recompute,
        "halved": len(sizes),
        "gradient_away": away,
        "two_equal_steps": noise,
        "failed": not sizes or away > 1e-2,
    }


def as_table(rows: list[Row]) -> Row:
    """Return the figures as `benchmarks/report.py` prints them."""
    return {"columns": [*COLUMNS], "rows": [[cell(found.get(name)) for name in COLUMNS.values()] for found in rows]}


def cell(value: object) -> str:
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)


def shown(found: Row) -> Row:
    cells = (f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}" for name, value in found.items())
    print("   ".join(cells), flush=True)
    return found


if __name__ == "__main__":
    main()
