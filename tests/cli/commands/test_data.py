"""`peer data`: a data set is built in real processes, also after kills, then described and checked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from peer.data.building.out_folder import OutFolder
from peer.data.building.packing import PackingNote
from peer.data.building.plan import read_note
from peer.data.pages.folder import BuiltPages
from tests.cli.support.typed import Peer, said
from tests.peer.data.building.builds import built, random_documents, small_tokenizer

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.process
OPTIONS = ("--seq-len", "31", "--held-out", "0.2")


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(4):
        text = "\n".join(json.dumps({"text": text.decode()}) for text in random_documents(60, seed=number))
        (folder / f"{number}.jsonl").write_text(text)
    return folder


def test_it_builds_describes_and_checks(peer: Peer, tmp_path: Path, texts: Path) -> None:
    tokenizer, out = small_tokenizer(tmp_path), tmp_path / "out"
    (texts / "x.txt.gz").write_bytes(b"no gzip")
    command = ("data", "build", texts, "--tokenizer", tokenizer, *OPTIONS, "--out", out, "--license", "CC0")
    done = peer(*command)
    index = BuiltPages.open(out).index
    assert done.code == 0 and f"root       {index.config.root}" in done.stdout
    assert f"not read   {texts}/x.txt.gz (damaged .gz)" in done.stdout and "240 documents" not in done.stderr
    assert index.tokenizer != "bytes" and index.tokenizers and index.license == "CC0"
    assert sorted(path.name for path in out.iterdir()) == [
        ".built",
        "held-out-00000.pages",
        "index.msgpack",
        "tokenizer.json",
        "train-00000.pages",
    ]
    assert f"{out} holds this data set already: {index.config.root}." in peer(*command).stdout
    assert "holds a data set of other files or options" in said(peer(*command, "--seed", "1"), 2)
    assert 'source = "pages"' in peer("data", "show", out).stdout
    shown = json.loads(peer("data", "show", out, "--json").stdout)
    assert shown["root"] == index.config.root and shown["train"]["documents"] == index.train.documents
    assert "is verified" in peer("data", "verify", out).stdout
    pages = out / "held-out-00000.pages"
    pages.write_bytes(b"\1" + pages.read_bytes()[1:])
    ended = peer("data", "verify", out)
    assert "1 damaged page: copy the folder again" in said(ended, 6)
    assert f"{pages}: page {index.train.pages} is not the page" in ended.stdout
    pages.unlink()
    (out / "tokenizer.json").write_text("{}")
    ended = peer("data", "verify", out)
    assert "2 damaged files" in said(ended, 6) and f"{pages} is missing" in ended.stdout
    strict = peer("data", "build", texts, "--tokenizer", "bytes", *OPTIONS, "--out", tmp_path / "strict", "--strict")
    assert "x.txt.gz cannot be read (damaged .gz): repair it, or leave --strict out" in said(strict, 2)


def killed_when(command: list[str], is_time: Callable[[], bool]) -> None:
    """Run a command and kill it once a condition holds."""
    child = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL, start_new_session=True)
    while not is_time():
        assert child.poll() is None
        os.sched_yield()
    child.send_signal(signal.SIGKILL)
    assert child.wait() == -signal.SIGKILL


def test_a_killed_build_continues_to_the_same_data_set(tmp_path: Path, texts: Path) -> None:
    for number in range(4):
        documents = random_documents(1500, seed=number)
        (texts / f"{number}.jsonl").write_text("\n".join(json.dumps({"text": text.decode()}) for text in documents))
    tokenizer, out = small_tokenizer(tmp_path), tmp_path / "out"
    script = str(ROOT / "tests" / "cli" / "support" / "build_child.py")
    environment = [sys.executable, script, "data", "build", str(texts), "--tokenizer", str(tokenizer)]
    command = [*environment, *OPTIONS, "--out", str(out)]
    work = OutFolder(out)
    killed_when(command, (work.private / "journal").exists)
    assert not work.note.exists() and not (out / "index.msgpack").exists()

    def packs() -> bool:
        note = read_note(work.note, PackingNote)
        return note is not None and note.bucket > 0

    killed_when(command, packs)
    assert not (out / "index.msgpack").exists()
    ended = subprocess.run([*command, "--one-core"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "Continuing the build that was begun here." in ended.stderr
    index = BuiltPages.open(out).index
    expected = built([texts], tmp_path / "whole", str(tokenizer), tokenizers=index.tokenizers, flush_bytes=64 << 20)
    assert index == expected and not work.work.exists()


def test_another_set_of_files_starts_over(peer: Peer, tmp_path: Path, texts: Path) -> None:
    out = tmp_path / "out"
    command = ("data", "build", texts, "--tokenizer", "bytes", "--out", out)
    assert "there are 0 tokens to train on" in said(peer(*command, "--seq-len", "500000"), 2)
    done = peer(*command, *OPTIONS)
    assert "was of other files or options: starting over" in done.stderr and done.code == 0
    assert BuiltPages.open(out).index == built([texts], tmp_path)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (("{tmp}/none", "--out", "{tmp}/out"), "{tmp}/none does not exist: name files and folders of text"),
        (("{texts}", "--out", "{texts}/out"), "lies in {texts}, which is read: choose a folder elsewhere"),
        (("{texts}", "--out", "{tmp}"), "{tmp} holds other files, such as 'texts': choose a new or empty folder"),
        (("{texts}", "--out", "/proc/none"), "cannot write /proc/none (No such file or directory): free some space"),
        (("{texts}", "--out", "{tmp}/out", "--tokenizer", "{tmp}/t"), "t cannot be read (No such file or directory)"),
        (("{texts}", "--out", "{tmp}/out", "--license", "a\nb"), "--license 'a\\nb' is longer than 1024 characters"),
        (("{texts}", "--out", "{tmp}/out", "--held-out", "0.9"), "--held-out 0.9 "),
        (("{texts}", "--out", ""), "--out is empty: write its value"),
        (("{texts}", "--out", "{tmp}/out", "--seq-len", "1048577"), "--seq-len 1048577 "),
        (("{texts}", "--out", "{tmp}/out", "--chat"), 'the tokenizer "bytes" has no chat template'),
        (("{texts}", "--out", "{tmp}/out", "--chat-template", "t"), "--chat-template is of conversations: give --chat"),
        (("org/name", "--out", "{tmp}/out"), "org/name is no file or folder here, and cannot be fetched from the Hub"),
    ],
)
def test_wrong_input_is_one_sentence(
    peer: Peer, tmp_path: Path, texts: Path, arguments: tuple[str, ...], sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    given = [argument.format(tmp=tmp_path, texts=texts) for argument in arguments]
    ended = peer("data", "build", "--tokenizer", "bytes", *OPTIONS, *given)
    assert ended.code in (2, 5), ended.stderr
    assert sentence.format(tmp=tmp_path, texts=texts) in said(ended, ended.code)


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.jsonl", b'{"body": "x"}\n{"body": "y"}\n', "has text in a field 'text' (skipped 1 .jsonl without text in"),
        ("a.png", b"x", "holds no text (skipped nothing): name files with one of the suffixes"),
    ],
)
def test_no_documents(peer: Peer, tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / name).write_bytes(content)
    ended = peer("data", "build", folder, "--tokenizer", "bytes", *OPTIONS, "--out", tmp_path / "out")
    assert sentence in said(ended, 2)


def test_a_tokenizer_that_is_none_is_refused(peer: Peer, tmp_path: Path, texts: Path) -> None:
    (tmp_path / "tokenizer.json").write_text('{"model": 1}')
    ended = peer("data", "build", texts, "--tokenizer", tmp_path / "tokenizer.json", *OPTIONS, "--out", tmp_path / "o")
    assert "tokenizer.json" in said(ended, 2)


def test_a_full_disk_is_one_sentence(peer: Peer, tmp_path: Path, texts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, content: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr("peer.data.building.packing.replace_file", full)
    ended = peer("data", "build", texts, "--tokenizer", "bytes", *OPTIONS, "--out", tmp_path / "out")
    assert "index.msgpack (No space left on device): free some space" in said(ended, 5)


def test_conversations_are_written_by_the_template_beside_the_tokenizer(peer: Peer, tmp_path: Path) -> None:
    tokenizer = small_tokenizer(tmp_path)
    talk = [{"role": "user", "content": "the old barn"}, {"role": "assistant", "content": "the new barn"}]
    (tmp_path / "talks.jsonl").write_text("\n".join(json.dumps({"messages": talk, "n": n}) for n in range(40)))
    command = ("data", "build", tmp_path / "talks.jsonl", "--tokenizer", tokenizer, "--chat", *OPTIONS)
    assert "has no chat template: name one with --chat-template FILE" in said(
        peer(*command, "--out", tmp_path / "a"), 2
    )
    template = (
        "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}{% if add_generation_prompt %}[assistant] "
    )
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template + "{% endif %}"}))
    done = peer(*command, "--out", tmp_path / "a")
    assert done.code == 0, done.stderr
    assert "conversations: 40 by comparing the text with and without each answer" in done.stdout
    assert "answers alone count in the loss, by the template" in peer("data", "show", tmp_path / "a").stdout
    (tmp_path / "other.jinja").write_text("{{ nothing.at.all }}")
    odd = peer(*command, "--out", tmp_path / "b", "--chat-template", tmp_path / "other.jinja")
    assert "conversations 'nothing' is undefined" in said(odd, 2)


def test_words_that_are_no_command(peer: Peer) -> None:
    assert "write `peer data build`, or see `peer data --help`" in said(peer("data", "biuld"), 2)
    assert "verify" in peer("data").stdout
