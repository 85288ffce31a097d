"""Checkpoints as people have them that are refused: each loads after what the error advises."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from peer.errors import CheckpointError, ConfigError
from peer.model.huggingface import load_pretrained
from tests.peer.model.people_checkpoints import (
    INDEX,
    LLAMA3,
    SIZES,
    WEIGHTS,
    Bases,
    Checkpoint,
    Edit,
    config,
    no_eos,
    tokenizer,
)
from tests.swarm.serving.both_readers import founded, ours


@dataclass(frozen=True)
class Refused:
    """A checkpoint that is refused."""

    edit: Edit
    words: str
    remedy: Callable[[Checkpoint, str, Path], None]
    """Does what the error says. Gets its text, and a sound checkpoint to take files from."""
    trains: bool = True
    """Whether training refuses it too; else only serving does."""


def put_back(*names: str) -> Callable[[Checkpoint, str, Path], None]:
    def remedy(made: Checkpoint, said: str, base: Path) -> None:
        for name in names:
            shutil.copy(base / name, made.folder / name)

    return remedy


def follow_command(made: Checkpoint, said: str, base: Path) -> None:
    """Run the Python of the command in an error."""
    command = said[said.index("python -c ") : said.rindex(")")]
    exec(shlex.split(command)[2], {})


def set_config(**changes: Any) -> Callable[[Checkpoint, str, Path], None]:
    return lambda made, said, base: made.config(**changes)


def pickled(made: Checkpoint) -> None:
    torch.save(made.weights(), made.folder / "pytorch_model.bin")
    made.remove(WEIGHTS)


def of_gpt2(made: Checkpoint) -> None:
    """Leave the two files of an older byte-level tokenizer."""
    vocabulary = json.loads((made.folder / "tokenizer.json").read_text())["model"]["vocab"]
    made.write("vocab.json", vocabulary | {"<|endoftext|>": 256})
    made.write("merges.txt", "#version: 0.2\n")
    made.write("tokenizer_config.json", {"tokenizer_class": "GPT2Tokenizer"})
    made.remove("tokenizer.json")


def without(*names: str) -> Edit:
    return lambda made: made.remove(*names)


def moved(name: str) -> Edit:
    def edit(made: Checkpoint) -> None:
        (made.folder / WEIGHTS).rename(made.folder / name)

    return edit


def moved_back(made: Checkpoint, said: str, base: Path) -> None:
    (made.folder / "weights.safetensors").rename(made.folder / WEIGHTS)


def lost_shard(made: Checkpoint, index: bool) -> None:
    made.shards(index)
    (made.folder / "model-00002-of-00002.safetensors").rename(made.folder.parent / "lost")


def find_shard(made: Checkpoint, said: str, base: Path) -> None:
    (lost,) = re.findall(r"model-\d+-of-\d+\.safetensors", said)
    (made.folder.parent / "lost").rename(made.folder / lost)


def twice(made: Checkpoint) -> None:
    weights = made.weights()
    made.save(weights | {"_orig_mod.model.norm.weight": weights["model.norm.weight"].clone()})


def once(made: Checkpoint, said: str, base: Path) -> None:
    assert "model.norm.weight" in said
    made.save({name: weight for name, weight in made.weights().items() if "_orig_mod" not in name})


def headless(made: Checkpoint) -> None:
    weights = made.weights()
    del weights["lm_head.weight"]
    made.save(weights)


def adapter(made: Checkpoint) -> None:
    made.remove(WEIGHTS)
    made.write("adapter_config.json", {"peft_type": "LORA"})


def unmerged(made: Checkpoint) -> None:
    renamed = {name.replace("q_proj.weight", "q_proj.base_layer.weight"): one for name, one in made.weights().items()}
    made.save(renamed | {"model.layers.0.self_attn.q_proj.lora_A.default.weight": torch.zeros(2, 32)})


def eight_bits(made: Checkpoint) -> None:
    made.save({name: weight.to(torch.float8_e4m3fn) for name, weight in made.weights().items()})


def packed(made: Checkpoint) -> None:
    made.save({name.replace("q_proj.weight", "q_proj.qweight"): one for name, one in made.weights().items()})


def pointer(name: str) -> Edit:
    return lambda made: made.write(name, "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")


def more_tokens(made: Checkpoint) -> None:
    tokenizer("<a>", "<b>", "<c>", "<d>", "<e>").save(str(made.folder / "tokenizer.json"))


def resize(made: Checkpoint, said: str, base: Path) -> None:
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(made.folder)
    size = re.findall(r"resize_token_embeddings\((\d+)\)", said)[0]
    model.resize_token_embeddings(int(size))
    model.save_pretrained(made.folder)


def eos_by_id(made: Checkpoint, said: str, base: Path) -> None:
    no_eos(made)
    made.write("generation_config.json", {"eos_token_id": 257})


def broken(name: str) -> Edit:
    return lambda made: made.write(name, (made.folder / name).read_text()[:-3])


REFUSED: Final = {
    "pickled": Refused(pickled, "pickled weights", follow_command),
    "no weights": Refused(without(WEIGHTS), "download the weights in safetensors", put_back(WEIGHTS)),
    "another name": Refused(
        moved("weights.safetensors"),
        "rename it to model.safetensors",
        moved_back,
    ),
    "GGUF": Refused(moved("model.gguf"), "G.dequantize=True.*save_pretrained", put_back(WEIGHTS)),
    "the authors' format": Refused(moved("consolidated.00.pth"), "format of their authors", put_back(WEIGHTS)),
    "a shard of the index": Refused(lambda made: lost_shard(made, True), f"which its {INDEX} names", find_shard),
    "a shard of the row": Refused(lambda made: lost_shard(made, False), "1 of 2 shards and lacks", find_shard),
    "one name twice": Refused(twice, "which name one parameter: remove one", once),
    "no head": Refused(headless, "set tie_word_embeddings to true", set_config(tie_word_embeddings=True)),
    "fewer layers": Refused(config(num_hidden_layers=3), "set num_hidden_layers to 2", set_config(num_hidden_layers=2)),
    "other biases": Refused(config(attention_bias=True), "lacks model.*bias", set_config(attention_bias=False)),
    "an adapter": Refused(adapter, "AutoPeftModelForCausalLM", put_back(WEIGHTS)),
    "an adapter inside": Refused(unmerged, "merge_and_unload", put_back(WEIGHTS)),
    "packed weights": Refused(packed, "its weights are quantized", put_back(WEIGHTS)),
    "fp8": Refused(eight_bits, "(type F8|float8).*: take", put_back(WEIGHTS)),
    "quantized": Refused(
        config(quantization_config={"quant_method": "gptq"}), r"quantized \(gptq\)", put_back("config.json")
    ),
    "a pointer for weights": Refused(pointer(WEIGHTS), "git lfs pull", put_back(WEIGHTS)),
    "a pointer for config.json": Refused(pointer("config.json"), "git lfs pull", put_back("config.json")),
    "a pointer for the tokenizer": Refused(
        pointer("tokenizer.json"), "git lfs pull", put_back("tokenizer.json"), trains=False
    ),
    "linear without its factor": Refused(
        config(rope_scaling={"type": "linear"}, rope_parameters=...),
        "lacks the factor of linear's rotary scaling: add",
        set_config(rope_scaling={"type": "linear", "factor": 2.0}),
    ),
    "llama3 without a factor": Refused(
        config(rope_scaling={**LLAMA3, "low_freq_factor": None}, rope_parameters=...),
        "lacks the low_freq_factor of llama3's rotary scaling: add",
        set_config(rope_scaling=LLAMA3),
    ),
    "no family": Refused(config(model_type=...), "write the one that it is of", set_config(model_type="llama")),
    "a number as text": Refused(config(vocab_size="264"), "correct that field", set_config(vocab_size=264)),
    "eos as text": Refused(config(eos_token_id="257"), "write the token's id", set_config(eos_token_id=257), False),
    "many stops": Refused(
        config(eos_token_id=list(range(40))), "more than 32: shorten", set_config(eos_token_id=[257]), False
    ),
    "a token by number": Refused(
        lambda made: made.edit("tokenizer_config.json", eos_token=257),
        "or remove it and name its id as eos_token_id",
        eos_by_id,
        False,
    ),
    "a template by number": Refused(
        lambda made: made.edit("tokenizer_config.json", chat_template=[7]),
        "or remove it",
        lambda made, said, base: made.edit("tokenizer_config.json", chat_template=...),
        False,
    ),
    "cut config.json": Refused(broken("config.json"), "download it again if it was cut short", put_back("config.json")),
    "cut tokenizer.json": Refused(
        broken("tokenizer.json"), "download it again if it was cut short", put_back("tokenizer.json"), False
    ),
    "no tokenizer": Refused(without("tokenizer.json"), "copy it from the model", put_back("tokenizer.json"), False),
    "an older tokenizer": Refused(of_gpt2, "convert its tokenizer", follow_command, trains=False),
    "more tokens than rows": Refused(more_tokens, r"resize_token_embeddings\(265\)", resize, trains=False),
}


@pytest.mark.parametrize("case", REFUSED.values(), ids=REFUSED)
def test_the_remedy_of_a_refused_checkpoint_helps(bases: Bases, tmp_path: Path, case: Refused) -> None:
    base = bases("Llama", {})
    folder = tmp_path / "a model"
    shutil.copytree(base, folder)
    made = Checkpoint(folder)
    case.edit(made)
    with pytest.raises((CheckpointError, ConfigError), match=case.words) as caught:
        founded(folder)
    if case.trains:
        with pytest.raises((CheckpointError, ConfigError), match=case.words):
            load_pretrained(folder)
    case.remedy(made, str(caught.value), base)
    assert ours(folder).isfinite().all() and founded(folder).model.vocab_size >= SIZES["vocab_size"]
