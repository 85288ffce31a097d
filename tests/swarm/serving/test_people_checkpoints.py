"""Checkpoints as people have them that are loaded, with the logits, stops and conversations of `transformers`."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from peer.data.chat_template import ChatTemplateCode
from tests.peer.model.people_checkpoints import CHATML, INST, LLAMA3, Bases, Checkpoint, Edit, config, no_eos
from tests.swarm.serving.both_readers import TOKENS, founded, ours

TALK: Final = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "OK"},
    {"role": "user", "content": "?"},
]
EOS: Final = 257  # of tokenizer_config.json


@dataclass(frozen=True)
class Loaded:
    """A checkpoint that is loaded."""

    edit: Edit
    stops: tuple[int, ...] = (EOS,)
    template: str = "the checkpoint's own"
    """How the sentence begins that says which template is used."""
    name: str | None = None
    """That template's name, for transformers; None where it needs none."""
    family: str = "Llama"
    extra: dict[str, Any] = field(default_factory=dict)
    ours_only: bool = False
    """Whether transformers does not load it as it is, so that its reference is the checkpoint before the edit."""


def names(rename: Callable[[str], str], **more: Any) -> Loaded:
    return Loaded(lambda made: made.rename(rename), ours_only=True, **more)


def several(*templates: tuple[str, str]) -> Edit:
    found = [{"name": name, "template": source} for name, source in templates]
    return lambda made: made.edit("tokenizer_config.json", chat_template=found)


def eos_in_the_map(made: Checkpoint) -> None:
    no_eos(made)
    made.write("special_tokens_map.json", {"eos_token": {"content": "<|im_end|>", "lstrip": False, "rstrip": False}})


def eos_in_generation(made: Checkpoint) -> None:
    no_eos(made)
    made.write("generation_config.json", {"eos_token_id": [259, 257]})


def eos_in_config(made: Checkpoint) -> None:
    no_eos(made)
    made.config(eos_token_id=258)


def eos_in_all_three(made: Checkpoint) -> None:
    made.write("generation_config.json", {"eos_token_id": 259})
    made.config(eos_token_id=[258, 259])


def eos_is_null(made: Checkpoint) -> None:
    made.config(eos_token_id=None, pad_token_id=None)
    made.write("generation_config.json", {"eos_token_id": None, "temperature": None})


def negative(made: Checkpoint) -> None:
    made.config(eos_token_id=[-1, 258], pad_token_id=-1, bos_token_id=-1)
    made.write("generation_config.json", {"eos_token_id": -1, "pad_token_id": -1, "bos_token_id": 256})


def beyond(made: Checkpoint) -> None:
    made.config(eos_token_id=[264, 10**12, 258], pad_token_id=32000, bos_token_id=1 << 40)


def loose_advice(made: Checkpoint) -> None:
    advice = {"top_k": -1, "temperature": 0.0, "top_p": 7, "min_p": -1.0, "repetition_penalty": 0, "do_sample": None}
    made.write("generation_config.json", advice)


def eos_as_object(made: Checkpoint) -> None:
    token = {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False, "rstrip": False, "normalized": False}
    made.edit("tokenizer_config.json", eos_token=token)


def listed_beside(made: Checkpoint) -> None:
    """Its eos has an id in tokenizer_config.json alone."""
    added = {str(id): {"content": word, "special": True} for id, word in ((256, "<s>"), (260, "<end>"))}
    made.edit("tokenizer_config.json", eos_token="<end>", added_tokens_decoder=added)


def with_marks(made: Checkpoint) -> None:
    for name in ("config.json", "tokenizer_config.json"):
        path = made.folder / name
        path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes())


def with_nan(made: Checkpoint) -> None:
    made.config(loss=float("nan"), initializer_note=float("inf"))
    made.write("generation_config.json", '{"temperature": NaN, "top_p": -Infinity}')


def in_files(made: Checkpoint) -> None:
    """A template of its own file counts before that of tokenizer_config.json, others stand beside it."""
    made.write("chat_template.jinja", INST)
    made.write("additional_chat_templates/tool_use.jinja", "tools")


def only_more_files(made: Checkpoint) -> None:
    made.write("additional_chat_templates/rag.jinja", "documents")
    made.write("additional_chat_templates/talk.jinja", INST)


def of_a_processor(made: Checkpoint) -> None:
    made.edit("tokenizer_config.json", chat_template=...)
    made.write("chat_template.json", {"chat_template": INST})


def too_long(made: Checkpoint) -> None:
    made.edit("tokenizer_config.json", chat_template=CHATML + "{# " + "x" * 40_000 + " #}")


def base_inside(name: str) -> str:
    return name.removeprefix("model.")


def fsdp(name: str) -> str:
    return re.sub(r"layers\.(\d)\.", r"layers.\1._fsdp_wrapped_module._checkpoint_wrapped_module.", name)


def old_table(made: Checkpoint) -> None:
    table = 10000.0 ** -(torch.arange(4) / 4)
    tables = {f"model.layers.{index}.self_attn.rotary_emb.inv_freq": table.clone() for index in (0, 1)}
    made.save(made.weights() | tables)


def lone_mark(made: Checkpoint) -> None:
    made.edit("tokenizer_config.json", chat_template={"talk": INST})


PLAIN_FIELDS: Final = {"rms_norm_eps": ..., "max_position_embeddings": ..., "rope_parameters": ..., "hidden_act": ...}
LOADED: Final = {
    "as saved": Loaded(config()),
    "negative ids": Loaded(negative, (258, EOS)),
    "ids beyond the vocabulary": Loaded(beyond, (258, EOS), ours_only=True),
    "eos null": Loaded(eos_is_null),
    "eos in the tokenizer's object": Loaded(eos_as_object, (259,)),
    "eos in the old map": Loaded(eos_in_the_map, (259,)),
    "eos in generation_config": Loaded(eos_in_generation, (259, 257)),
    "eos in config": Loaded(eos_in_config, (258,)),
    "eos in all three": Loaded(eos_in_all_three, (259, 258, EOS)),
    "eos in the list of added tokens": Loaded(listed_beside, (260,)),
    "no eos": Loaded(no_eos, ()),
    "advice out of bounds": Loaded(loose_advice),
    "compiled": names(lambda name: f"_orig_mod.{name}"),
    "compiled by layer": names(lambda name: re.sub(r"layers\.(\d)\.", r"layers.\1._orig_mod.", name)),
    "DDP": names(lambda name: f"module.{name}"),
    "DDP of compiled": names(lambda name: f"module._orig_mod.{name}"),
    "FSDP with checkpointing": names(fsdp),
    "inside of an object": names(lambda name: f"model.{name}"),
    "base model, tied": names(base_inside, extra={"tie_word_embeddings": True}),
    "base names and a head": names(base_inside),
    "base names, as transformers adds them": Loaded(lambda made: made.rename(base_inside)),
    "shards": Loaded(lambda made: made.shards(index=True)),
    "shards without an index": Loaded(lambda made: made.shards(index=False), ours_only=True),
    "the old rotary table": Loaded(old_table),
    "float64": Loaded(
        lambda made: made.save({name: one.double() for name, one in made.weights().items()}), ours_only=True
    ),
    "a byte-order mark": Loaded(with_marks, ours_only=True),
    "NaN": Loaded(with_nan),
    "llama3 without its length": Loaded(config(rope_scaling=LLAMA3, rope_parameters=...)),
    "few fields, Llama": Loaded(config(**PLAIN_FIELDS, num_key_value_heads=...), extra={"num_key_value_heads": 4}),
    "few fields, Mistral": Loaded(
        config(**PLAIN_FIELDS, num_key_value_heads=..., sliding_window=...),
        family="Mistral",
        extra={"num_attention_heads": 8, "num_key_value_heads": 8},
    ),
    "few fields, Qwen2": Loaded(
        config(**PLAIN_FIELDS, num_key_value_heads=..., num_attention_heads=...),
        family="Qwen2",
        extra={"num_attention_heads": 32, "num_key_value_heads": 32, "hidden_size": 64},
    ),
    "few fields, Qwen3": Loaded(
        config(**PLAIN_FIELDS, head_dim=...), family="Qwen3", extra={"head_dim": 128, "num_attention_heads": 2}
    ),
    "default of two": Loaded(
        several(("default", CHATML), ("rag", "r")), template='"default" of 2 (default, rag); --template NAME'
    ),
    "none is default": Loaded(
        several(("tool_use", "t"), ("rag", "r"), ("chatml", CHATML)),
        template='"chatml" of 3 (chatml, tool_use, rag), as none is called default; --template NAME chooses another.',
        name="chatml",
    ),
    "all are for tools": Loaded(several(("tool_use", INST), ("rag", "r")), template='"tool_use" of 2', name="tool_use"),
    "one name twice": Loaded(several(("talk", "x"), ("talk", INST)), template='the checkpoint\'s "talk".', name="talk"),
    "an object of one": Loaded(lone_mark, template='the checkpoint\'s "talk".', name="talk"),
    "in files": Loaded(in_files, template='"default" of 2 (default, tool_use)'),
    "only in more files": Loaded(only_more_files, template='"talk" of 2 (talk, rag)', name="talk"),
}


@pytest.fixture(scope="module")
def transformers() -> Any:
    return pytest.importorskip("transformers")


@pytest.mark.parametrize("case", LOADED.values(), ids=LOADED)
def test_a_checkpoint_is_loaded_as_transformers_loads_it(
    transformers: Any, bases: Bases, tmp_path: Path, case: Loaded
) -> None:
    base = bases(case.family, case.extra)
    folder = tmp_path / "model"
    shutil.copytree(base, folder)
    case.edit(Checkpoint(folder))
    reference = base if case.ours_only else folder
    theirs = transformers.AutoModelForCausalLM.from_pretrained(reference).eval()
    with torch.no_grad():
        torch.testing.assert_close(ours(folder), theirs(TOKENS).logits, rtol=1e-4, atol=1e-5)
    manifest = founded(folder)
    rules = manifest.text
    assert rules.stops == case.stops
    assert rules.choice().sentence.startswith(f"Chat template: {case.template}")
    tokens = transformers.AutoTokenizer.from_pretrained(reference)
    expected = tokens.apply_chat_template(TALK, chat_template=case.name, tokenize=False, add_generation_prompt=True)
    assert ChatTemplateCode(rules.chat_template, rules.bos, rules.eos).render(TALK) == expected


@pytest.mark.parametrize(
    ("edit", "sentence", "source"),
    [
        (of_a_processor, "the checkpoint's own.", INST),
        (lambda made: made.edit("tokenizer_config.json", chat_template=...), "none in the checkpoint, so", ""),
        (too_long, '"user: ..." lines, as the checkpoint\'s is too long; --template FILE takes another.', ""),
        (several(("default", "x" * 40_000), ("talk", INST)), '"user: ..." lines, as the checkpoint\'s is too long', ""),
        (several(("big", "x" * 40_000), ("talk", INST)), 'the checkpoint\'s "talk". Left out: big, longer', INST),
    ],
    ids=["a processor's", "none", "too long", "a default that is too long", "another that is too long"],
)
def test_templates_that_transformers_has_not_are_told(
    bases: Bases, tmp_path: Path, edit: Edit, sentence: str, source: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bases("Llama", {}), folder)
    edit(Checkpoint(folder))
    rules = founded(folder).text
    assert rules.choice().sentence.startswith(f"Chat template: {sentence}") and rules.chat_template == source
