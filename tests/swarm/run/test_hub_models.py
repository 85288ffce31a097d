"""A checkpoint with an id of the Hub is found in the cache or fetched, without anything that could be run."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import constants

from cli.commands.data.hub_texts import fetched
from peer.errors import ConfigError, ResourceError
from swarm.run.hub_models import CHAT, expanded, located

SHA = "0" * 39 + "1"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"version": "1.0"}',
    "tokenizer_config.json": b'{"eos_token": "</s>"}',
    "chat_template.jinja": b"{{ messages }}",
    "README.md": b"# about it",
    "data/train.jsonl": b'{"text": "the old barn"}',
    "data/picture.png": b"pixels",
    "model.safetensors": b"weights",
    "modeling_evil.py": b"import os",
    "pytorch_model.bin": b"pickle",
    "original/params.json": b"{}",
}
ASKED: list[str] = []


class Hub(BaseHTTPRequestHandler):
    """As much of the Hub as fetching a model takes. Only what ends with `/large` says that it fills a disk."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def log_message(self, *_: object) -> None:
        pass

    def _answer(self) -> None:
        path = self.path.partition("?")[0]
        name = path.partition(f"/resolve/{SHA}/")[2]
        if f"/tree/{SHA}" in path:
            listed = [{"type": "file", "path": file, "size": len(FILES[file]), "oid": SHA} for file in FILES]
            self._send(200, json.dumps(listed).encode())
        elif path.startswith(("/api/models/people/", "/api/datasets/people/")):
            size = 1 << 60 if "/large" in path else None
            files = [{"rfilename": file, "size": size or len(content)} for file, content in FILES.items()]
            content = json.dumps({"id": "people/model", "sha": SHA, "siblings": files}).encode()
            self._send(200, content)
        elif name in FILES:
            ASKED.append(name)
            self._send(200, FILES[name])
        else:
            self._send(404, b"")

    def _send(self, status: int, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Content-Type", "application/json")
        self.send_header("ETag", f'"{len(content)}"')
        self.send_header("X-Repo-Commit", SHA)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ThreadingHTTPServer]:
    ASKED.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        here = f"http://127.0.0.1:{server.server_address[1]}"
        monkeypatch.setattr(constants, "ENDPOINT", here)
        template = f"{here}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_a_model_is_fetched_once_and_nothing_that_runs(hub: ThreadingHTTPServer) -> None:
    folder = located("people/model")
    wanted = {"config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "model.safetensors"}
    assert {path.name for path in folder.iterdir()} == wanted
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    asked = len(ASKED)
    assert located("people/model") == folder and len(ASKED) == asked, "it is in the cache"


def test_of_a_tokenizer_only_its_file_is_fetched(hub: ThreadingHTTPServer) -> None:
    folder = located("people/model", "tokenizer.json")
    assert [path.name for path in folder.iterdir()] == ["tokenizer.json"]
    assert (located("people/model") / "model.safetensors").exists(), "a tokenizer in the cache is no checkpoint"


def test_of_a_chat_template_the_files_that_it_may_be_in_are_fetched(hub: ThreadingHTTPServer) -> None:
    folder = located("people/model", CHAT)
    assert {path.name for path in folder.iterdir()} == {"tokenizer_config.json", "chat_template.jinja"}


def test_of_a_data_set_the_texts_are_fetched(hub: ThreadingHTTPServer) -> None:
    folder = fetched("people/texts")
    files = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert "data/train.jsonl" in files and not files & {"README.md", "data/picture.png", "model.safetensors"}
    with pytest.raises(ResourceError, match=r"people/large has .* GB of text"):
        fetched("people/large")
    with pytest.raises(ConfigError, match="is no file or folder here, and cannot be fetched from the Hub"):
        fetched("nobody/texts")


def test_what_cannot_be_had_is_one_sentence(hub: ThreadingHTTPServer, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ResourceError, match=r"people/large has .* GB free: free some space"):
        located("people/large")
    with pytest.raises(ConfigError, match=r"nobody/model is no folder here, .* with `hf download nobody/model`"):
        located("nobody/model")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ConfigError, match=r"cannot be downloaded .* with `hf download people/model`"):
        located("people/model")


def test_paths_are_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "people" / "model").mkdir(parents=True)
    assert located("~/hub") == tmp_path / "hub" and located("people/model") == Path("people/model")
    assert located("../people/other") == Path("../people/other") and located("a/b/c") == Path("a/b/c")
    with pytest.raises(ConfigError, match="unknown home directory: write the whole path"):
        expanded("~nobody-of-that-name/hub")
