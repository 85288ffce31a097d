"""Checkpoints as people have them: loaded with the logits, stops and conversations of `transformers`, or refused with a
remedy after which they load."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import torch

from peer.data.chat_template import ChatTemplateCode
from peer.errors import CheckpointError, ConfigError
from peer.identity import Identity
from peer.model.decoder import Decoder
from peer.model.huggingface import flatten, load_pretrained
from peer.model.parameter_files import ParameterFiles
from swarm.run.manifest import ServedModelManifest
from swarm.serving.create_model import FoundedModel, create_model
from tests.peer.model.people_checkpoints import CHATML, INDEX, INST, SIZES, WEIGHTS, Checkpoint, sound, tokenizer

TALK: Final = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "OK"},
    {"role": "user", "content": "?"},
]
EOS: Final = 257  # of tokenizer_config.json
Edit = Callable[[Checkpoint], None]
TOKENS: Final = torch.randint(0, 256, (1, 24), generator=torch.Generator().manual_seed(3))


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


def config(**changes: Any) -> Edit:
    return lambda made: made.config(**changes)


def several(*templates: tuple[str, str]) -> Edit:
    found = [{"name": name, "template": source} for name, source in templates]
    return lambda made: made.edit("tokenizer_config.json", chat_template=found)


def no_eos(made: Checkpoint) -> None:
    made.edit("tokenizer_config.json", eos_token=...)


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


LLAMA3: Final = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
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


@pytest.fixture(scope="module")
def bases(transformers: Any, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, dict[str, Any]], Path]:
    """Return what writes a sound checkpoint, each one once."""
    made: dict[str, Path] = {}

    def base(family: str, extra: dict[str, Any]) -> Path:
        key = f"{family} {sorted(extra.items())}"
        if key not in made:
            made[key] = sound(tmp_path_factory.mktemp("base"), family, **extra).folder
        return made[key]

    return base


def founded(folder: Path, template: str | None = None) -> ServedModelManifest:
    home = Path(tempfile.mkdtemp(dir=folder.parent))
    return create_model(home, folder, Identity.generate(), FoundedModel("m", True, template=template)).manifest


def ours(folder: Path) -> torch.Tensor:
    """Return the logits that this program computes, after checking that both readers hold the same parameters."""
    shape, tensors = load_pretrained(folder)
    files = ParameterFiles([folder])
    assert all(torch.equal(files.tensor(name), tensor) for name, tensor in tensors.items())
    with torch.no_grad():
        return Decoder(shape, flatten(shape, tensors))(TOKENS)


@pytest.mark.parametrize("case", LOADED.values(), ids=LOADED)
def test_a_checkpoint_is_loaded_as_transformers_loads_it(
    transformers: Any, bases: Callable[[str, dict[str, Any]], Path], tmp_path: Path, case: Loaded
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
    bases: Callable[[str, dict[str, Any]], Path], tmp_path: Path, edit: Edit, sentence: str, source: str
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(bases("Llama", {}), folder)
    edit(Checkpoint(folder))
    rules = founded(folder).text
    assert rules.choice().sentence.startswith(f"Chat template: {sentence}") and rules.chat_template == source


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
def test_the_remedy_of_a_refused_checkpoint_helps(
    bases: Callable[[str, dict[str, Any]], Path], tmp_path: Path, case: Refused
) -> None:
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
