"""`peer export` from disk, and what a failed export leaves."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

import pytest
import trio
from safetensors.torch import load_file, save_file
from torch import Tensor

from cli.commands.export import _data_set, _noted
from cli.templates import template
from peer.config import ModelConfig, WeightType
from peer.data.pages.index import encode_index
from peer.data.tokenizer import ByteTokenizer
from peer.errors import CheckpointError, ConfigError
from peer.events import EventLog
from peer.identity import Identity
from peer.model.huggingface import export_pretrained
from peer.model.layout import init_flat
from peer.model.text.rules import Generation, TextRules, read_text_rules
from swarm.coordinator.create_run import create_run
from swarm.run.config import parse_run_config
from swarm.run.home import Home
from swarm.run.manifest import Manifest, open_manifest
from swarm.run.manifest_transfer import load_run_files
from tests.cli.support.typed import Peer, said
from tests.cli.test_pipeline_input import home_with_checkpoints
from tests.peer.data.pages.data_sets import write_data_set

MODEL = ModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate_size=16, max_seq_len=64)


async def test_the_coordinator_has_no_trained_model_to_export(peer: Peer, tmp_path: Path) -> None:
    home, out = tmp_path / "coordinator", tmp_path / "model"
    authority = Identity.load_or_create(Home(home).identity)
    await trio.to_thread.run_sync(create_run, home, parse_run_config(template()), authority, EventLog())
    sentence = said(peer("export", "--home", home, "--out", out), 6)
    assert f"{home} is the coordinator's home" in sentence and "--home of a peer that trained" in sentence
    assert "INVITE" in sentence and not out.exists()
    run_files = load_run_files(home)
    assert run_files is not None
    trained = await home_with_checkpoints(tmp_path / "peer", open_manifest(run_files[0]), authority, [0])
    ended = peer("export", "--home", home, "--home", trained, "--out", out)
    assert ended.code == 0 and "Round 4 of" in ended.stdout


def test_an_interrupted_export_leaves_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(weights: Mapping[str, Tensor], path: Path, metadata: Mapping[str, str]) -> None:
        save_file(dict(weights), path, metadata=dict(metadata))
        raise KeyboardInterrupt

    monkeypatch.setattr("peer.model.huggingface.save_file", interrupted)
    with pytest.raises(KeyboardInterrupt):
        export_pretrained(tmp_path, MODEL, init_flat(MODEL, 0), ByteTokenizer())
    assert not list(tmp_path.glob("model.safetensors*")) and not (tmp_path / "config.json").exists()


def original(folder: Path, dtype: WeightType) -> Path:
    """Write a checkpoint with all that people put beside the weights."""
    config = ModelConfig(
        vocab_size=300, hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate_size=16, max_seq_len=128
    )
    text = TextRules(
        stops=(257, 258), bos_id=256, pad_id=259, bos="<s>", eos="</s>", pad="<pad>", unk="<unk>",
        chat_template="{% for m in messages %}{{ bos_token }}{{ m.content }}{% endfor %}",
        generation=Generation(do_sample=True, temperature=0.6, top_p=0.9, top_k=20),
    )  # fmt: skip
    export_pretrained(folder, config, init_flat(config, 0), ByteTokenizer(), text, dtype)
    return folder


async def created(home: Path, folder: Path, authority: Identity) -> Manifest:
    """Create a run from a checkpoint, and give the home a checkpoint of round 4."""
    text = template()
    sized = text[text.index("hidden_size") : text.index("[data]")]
    run = parse_run_config(text.replace(sized, f"init = {str(folder)!r}\n"))
    await trio.to_thread.run_sync(create_run, home / "c", run, authority, EventLog())
    run_files = load_run_files(home / "c")
    assert run_files is not None
    manifest = open_manifest(run_files[0])
    await home_with_checkpoints(home / "p", manifest, authority, [0])
    return manifest


@pytest.mark.parametrize(("dtype", "option"), [("bf16", ""), ("fp16", ""), ("fp32", ""), ("bf16", "fp32")])
async def test_what_a_checkpoint_says_comes_back(
    peer: Peer, tmp_path: Path, dtype: WeightType, option: WeightType
) -> None:
    transformers = pytest.importorskip("transformers")
    authority = Identity.load_or_create(Home(tmp_path / "c").identity)
    folder, out = original(tmp_path / "hub", dtype), tmp_path / "out"
    manifest = await created(tmp_path, folder, authority)
    shutil.copy(folder / "tokenizer.json", tmp_path / "p" / "tokenizer.json")
    chosen = ["--dtype", option] if option else []
    before = os.umask(0o022)
    try:
        ended = peer("export", "--home", tmp_path / "p", "--out", out, *chosen)
    finally:
        os.umask(before)
    assert ended.code == 0, ended.stderr
    assert manifest.text == read_text_rules(out) == read_text_rules(folder)
    assert {str(tensor.dtype) for tensor in load_file(out / "model.safetensors").values()} == {
        {"bf16": "torch.bfloat16", "fp16": "torch.float16", "fp32": "torch.float32"}[option or dtype]
    }
    assert {path.stat().st_mode & 0o777 for path in out.iterdir()} == {0o644}
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    assert (tokenizer.bos_token, tokenizer.eos_token, tokenizer.pad_token) == ("<s>", "</s>", "<pad>")
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False) == "<s>hi"
    drawn = transformers.GenerationConfig.from_pretrained(out)
    assert (drawn.eos_token_id, drawn.bos_token_id, drawn.pad_token_id) == ([257, 258], 256, 259)
    assert (drawn.do_sample, drawn.temperature, drawn.top_p, drawn.top_k) == (True, 0.6, 0.9, 20)


async def test_another_model_is_replaced_only_if_asked_for(peer: Peer, tmp_path: Path) -> None:
    home, out = tmp_path / "coordinator", tmp_path / "out"
    authority = Identity.load_or_create(Home(home).identity)
    await trio.to_thread.run_sync(create_run, home, parse_run_config(template()), authority, EventLog())
    run_files = load_run_files(home)
    assert run_files is not None
    trained = await home_with_checkpoints(tmp_path / "peer", open_manifest(run_files[0]), authority, [0])
    original(out, "bf16")
    (out / "model.safetensors").rename(out / "model-00001-of-00002.safetensors")
    (out / "notes.txt").write_text("mine")
    kept = {path.name: path.read_bytes() for path in out.iterdir()}
    export = ("export", "--home", trained, "--out", out)
    sentence = said(peer(*export), 2)
    assert "holds another model or other files" in sentence and "--force" in sentence
    assert kept == {path.name: path.read_bytes() for path in out.iterdir()}
    assert peer(*export, "--force").code == 0
    assert [path.name for path in out.glob("*.safetensors")] == ["model.safetensors"]
    assert (out / "notes.txt").read_text() == "mine" and not (out / "chat_template.jinja").exists()
    card = out / "README.md"
    assert "| 4 of 12 |" in card.read_text() and not (card.stat().st_mode & 0o111)
    card.write_text("written before")
    assert peer(*export).code == 0, "an export of the same run is brought up to date"
    assert card.read_text() == "written before", "a card that a person has written stays"
    assert "add --push ORG/NAME" in said(peer(*export, "--public"), 2)
    assert "write ORG/NAME" in said(peer(*export, "--push", "name"), 2)


def test_the_card_takes_what_a_home_has_noted_and_no_more(tmp_path: Path) -> None:
    events = tmp_path / "events.jsonl"
    log = EventLog(events)
    log.emit("corpus_read", files=-1, account="out of bounds")
    log.emit("val_evaluated", round=4, loss=0.75)
    log.emit("val_evaluated", round=5, loss=0.5)
    log.close()
    assert _noted(events, 4) == (0.75, None) and _noted(tmp_path / "none", 4) == (None, None)


def test_the_card_takes_the_index_of_the_runs_own_data_set(tmp_path: Path) -> None:
    index, _, _ = write_data_set(tmp_path / "data", seq_len=63, windows=10)
    other, _, _ = write_data_set(tmp_path / "other", seq_len=63, windows=11)
    homes = [tmp_path / name for name in ("none", "of_another", "its_own")]
    for home, found in zip(homes[1:], (other, index), strict=True):
        home.mkdir()
        (home / "pages.index").write_bytes(encode_index(found))
    assert _data_set(homes, index.config) == index
    assert _data_set(homes[:2], index.config) is None and _data_set(homes, None) is None


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("generation_config.json", '{"eos_token_id": "2"}'),
        ("generation_config.json", f'{{"eos_token_id": {list(range(33))}}}'),
        ("tokenizer_config.json", '{"bos_token": 7}'),
        ("tokenizer_config.json", '{"bos_token"'),
    ],
)
def test_texts_out_of_bounds_are_refused(tmp_path: Path, name: str, content: str) -> None:
    (original(tmp_path, "fp32") / name).write_text(content)
    with pytest.raises((CheckpointError, ConfigError), match=r": (write|shorten|correct) "):
        read_text_rules(tmp_path)
