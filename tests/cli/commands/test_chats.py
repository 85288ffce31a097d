"""`peer coordinate` with conversations: the template that names them, and what is refused before a run is made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.templates import with_settings
from peer.config import ModelConfig
from peer.data.tokenizer import load_tokenizer
from peer.errors import ConfigError
from peer.model.huggingface import export_pretrained
from peer.model.layout import init_flat
from swarm.run.config import ChatsConfig, parse_run_config, read_run_config
from tests.cli.support.typed import Peer, said
from tests.peer.data.building.builds import small_tokenizer

BASE = ModelConfig(hidden_size=16, layers=1, heads=2, kv_heads=1, intermediate_size=32, max_seq_len=64, vocab_size=320)
TALK = [{"role": "user", "content": "the old barn"}, {"role": "assistant", "content": "the new barn"}]
SIZES = "hidden_size = 16\nlayers = 1\nheads = 2\nkv_heads = 1\nintermediate_size = 32\nmax_seq_len = 64"
BYTES = f'[run]\nname = "x"\n[model]\n{SIZES}\n'
SECTIONS = '[data]\nseq_len = 31\nchats = "c.jsonl"\n[inner]\nlr = 1e-3\nbatch_size = 1\ntotal_steps = 10\n[outer]\n'


@pytest.fixture
def run_toml(peer: Peer, tmp_path: Path) -> Path:
    """A RUN.toml that tunes a checkpoint without a chat template to conversations, as `--init` writes it."""
    (tmp_path / "chats").mkdir()
    (tmp_path / "chats" / "a.jsonl").write_text(json.dumps({"messages": TALK}))
    export_pretrained(tmp_path / "base", BASE, init_flat(BASE, 1), load_tokenizer(str(small_tokenizer(tmp_path))))
    path = tmp_path / "tuned.toml"
    options = ("--init", "--tune", tmp_path / "base", "--chats", tmp_path / "chats")
    done = peer("coordinate", *options, path)
    assert done.code == 0 and done.stdout.strip().endswith(f"peer coordinate {path}"), done.stderr
    path.write_text(with_settings(path.read_text(), "data", {"seq_len": 31}))
    return path


def test_the_template_names_the_conversations_and_they_become_a_data_set(run_toml: Path) -> None:
    config = read_run_config(run_toml)
    assert config.chats == ChatsConfig(path=str(run_toml.parent / "chats")) and config.data.source == "pages"
    assert config.data.pages is None and config.adapter is not None
    text = with_settings(run_toml.read_text(), "data", {"chat_template": "chat.jinja"})
    assert parse_run_config(text).chats == ChatsConfig(path=str(run_toml.parent / "chats"), template="chat.jinja")


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"source": "folder"}, r"\[data\] source: of chats a data set is built: leave source out, or set it to"),
        ({"chats": ""}, r"\[data\] chats: chats is '': name a file or folder"),
        ({"chat_template": 3}, r"\[data\] chat_template: chat_template is 3: name a file or folder"),
        ({"chat": "x"}, r"\[data\] chat: unknown field: write chats"),
    ],
)
def test_what_the_file_says_of_conversations_is_checked(
    run_toml: Path, settings: dict[str, str | int], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=rf"line \d+: {sentence}"):
        parse_run_config(with_settings(run_toml.read_text(), "data", settings))


def test_a_template_of_no_conversations_is_refused() -> None:
    text = BYTES + SECTIONS.replace("chats =", "chat_template =")
    with pytest.raises(ConfigError, match="chat_template is of conversations: name these in chats, too"):
        parse_run_config(text)


def test_conversations_without_what_it_takes_are_refused(peer: Peer, tmp_path: Path, run_toml: Path) -> None:
    home = ("--home", tmp_path / "home")
    assert "has no chat template: name one with" in said(peer("coordinate", run_toml, *home), 2)
    assert "another: leave one out" in said(peer("coordinate", run_toml, *home, "--data", tmp_path), 2)
    template = tmp_path / "chat.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    text = with_settings(run_toml.read_text(), "data", {"chat_template": str(template)})
    run_toml.write_text(text)
    few = said(peer("coordinate", run_toml, *home), 2)
    assert "there are" in few and "tokens to train on" in few
    (tmp_path / "chats" / "a.jsonl").write_text('{"text": "the old barn"}\n{"text": "the new barn"}')
    form = 'write each conversation on a line as {"messages": [{"role": "user", "content": "..."}, ...]}'
    assert form in said(peer("coordinate", run_toml, *home), 2)
    run_toml.write_text(with_settings(text, "data", {"chats": str(tmp_path / "none")}))
    gone = said(peer("coordinate", run_toml, *home), 2)
    assert f"[data] chats names {tmp_path / 'none'}, which does not exist: correct it in RUN.toml" in gone
    run_toml.write_text(BYTES + SECTIONS)
    assert "chats needs the tokenizer of a chat model, and this run has bytes" in said(
        peer("coordinate", run_toml, *home), 2
    )
    assert "--chats counts only beside --tune" in said(peer("coordinate", "--init", "--chats", tmp_path), 2)
