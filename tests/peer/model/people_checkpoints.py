"""Tiny checkpoints as people have them: a sound one of each family, and edits of its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from peer.data.tokenizer import _stand_in

VOCABULARY: Final = 264
SPECIAL: Final = ("<s>", "</s>", "<|im_start|>", "<|im_end|>")  # ids 256 to 259
CHATML: Final = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
INST: Final = "{{ bos_token }}{% for m in messages %}[INST] {{ m.content }} [/INST]{{ eos_token }}{% endfor %}"
WEIGHTS: Final = "model.safetensors"
INDEX: Final = "model.safetensors.index.json"
SIZES: Final = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3: Final = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
Rename = Callable[[str], str]
Bases = Callable[[str, dict[str, Any]], Path]
"""The folder of a sound checkpoint of a family, with these changes of its config."""


def tokenizer(*more: str) -> Tokenizer:
    """Return a byte-level BPE without merges."""
    made = Tokenizer(models.BPE(vocab={_stand_in(byte): byte for byte in range(256)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, special=True) for word in (*SPECIAL, *more)])
    return made


class Checkpoint:
    """A folder, and edits of its files."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, name: str, content: Any) -> None:
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(content if isinstance(content, str) else json.dumps(content))

    def edit(self, name: str, **changes: Any) -> None:
        """Change fields of a JSON file; `...` removes one."""
        path = self.folder / name
        fields = (json.loads(path.read_text()) if path.exists() else {}) | changes
        self.write(name, {key: value for key, value in fields.items() if value is not ...})

    def config(self, **changes: Any) -> None:
        self.edit("config.json", **changes)

    def remove(self, *names: str) -> None:
        for name in names:
            (self.folder / name).unlink()

    def weights(self) -> dict[str, torch.Tensor]:
        return load_file(self.folder / WEIGHTS)

    def save(self, weights: dict[str, torch.Tensor], name: str = WEIGHTS) -> None:
        save_file(weights, self.folder / name, metadata={"format": "pt"})

    def rename(self, renamed: Rename) -> None:
        self.save({renamed(name): weight for name, weight in self.weights().items()})

    def shards(self, index: bool) -> None:
        """Split the weights into two files."""
        halves: dict[str, dict[str, torch.Tensor]] = {}
        for name, weight in self.weights().items():
            halves.setdefault(f"model-0000{1 + ('layers.1' in name)}-of-00002.safetensors", {})[name] = weight
        for file, half in halves.items():
            self.save(half, file)
        self.remove(WEIGHTS)
        if index:
            self.write(
                INDEX, {"metadata": {}, "weight_map": {name: file for file, half in halves.items() for name in half}}
            )


def sound(folder: Path, family: str = "Llama", **extra: Any) -> Checkpoint:
    """Write a random model of `transformers` with its tokenizer and a chat template."""
    import transformers

    torch.manual_seed(5)
    config = getattr(transformers, f"{family}Config")(**{**SIZES, "eos_token_id": None, "bos_token_id": None, **extra})
    model = getattr(transformers, f"{family}ForCausalLM")(config)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1)
    model.save_pretrained(folder)
    tokenizer().save(str(folder / "tokenizer.json"))
    made = Checkpoint(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    made.write("tokenizer_config.json", {**tokens, "chat_template": CHATML})
    return made


Edit = Callable[[Checkpoint], None]


def config(**changes: Any) -> Edit:
    return lambda made: made.config(**changes)


def no_eos(made: Checkpoint) -> None:
    made.edit("tokenizer_config.json", eos_token=...)
